// Obeys the lines of process.py by franz-go.
package main

import (
	"bufio"
	"context"
	"encoding/base64"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

const patience = 30 * time.Second

var codecs = map[string]kgo.CompressionCodec{
	"none":   kgo.NoCompression(),
	"gzip":   kgo.GzipCompression(),
	"snappy": kgo.SnappyCompression(),
	"lz4":    kgo.Lz4Compression(),
	"zstd":   kgo.ZstdCompression(),
}

func main() {
	servers := kgo.SeedBrokers(strings.Split(os.Args[1], ",")...)
	requests := bufio.NewReader(os.Stdin)
	for {
		line, err := requests.ReadString('\n')
		if err != nil {
			return
		}
		words, err := answer(servers, strings.Fields(line))
		if err != nil {
			fmt.Println("error", strings.ReplaceAll(err.Error(), "\n", " "))
		} else {
			fmt.Println(strings.Join(append([]string{"ok"}, words...), " "))
		}
	}
}

func answer(servers kgo.Opt, words []string) ([]string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	switch words[0] {
	case "join":
		return nil, joined.join(servers, words[1], words[2], words[3])
	case "poll":
		return joined.poll(words[1])
	case "commit":
		return nil, joined.client.CommitUncommittedOffsets(ctx)
	case "leave":
		joined.client.Close()
		return nil, nil
	}
	topic, rest := words[1], words[2:]
	switch words[0] {
	case "create":
		return nil, create(ctx, servers, topic, rest[0])
	case "produce":
		return produce(ctx, servers, topic, rest[0], rest[1], rest[2:])
	case "consume":
		return consume(ctx, servers, topic, rest[0], rest[1:])
	case "offset-at":
		return offsetAt(ctx, servers, topic, rest[0], rest[1])
	}
	return nil, fmt.Errorf("unknown request %q", words[0])
}

func create(ctx context.Context, servers kgo.Opt, topic, partitions string) error {
	count, err := strconv.ParseInt(partitions, 10, 32)
	if err != nil {
		return err
	}
	client, err := kgo.NewClient(servers)
	if err != nil {
		return err
	}
	defer client.Close()
	_, err = kadm.NewClient(client).CreateTopic(ctx, int32(count), 1, nil, topic)
	return err
}

func produce(ctx context.Context, servers kgo.Opt, topic, partition, codec string, words []string) ([]string, error) {
	number, err := strconv.ParseInt(partition, 10, 32)
	if err != nil {
		return nil, err
	}
	client, err := kgo.NewClient(
		servers,
		kgo.RequiredAcks(kgo.AllISRAcks()),
		kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.ProducerBatchCompression(codecs[codec]),
		kgo.ProducerLinger(time.Minute), // the flush ends it: all records share a batch
	)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	var records []*kgo.Record
	for _, word := range words {
		record, err := parsed(word)
		if err != nil {
			return nil, err
		}
		record.Topic, record.Partition = topic, int32(number)
		records = append(records, record)
	}
	errs := make(chan error, len(records))
	for _, record := range records {
		client.Produce(ctx, record, func(_ *kgo.Record, err error) { errs <- err })
	}
	if err := client.Flush(ctx); err != nil {
		return nil, err
	}
	for range records {
		if err := <-errs; err != nil {
			return nil, err
		}
	}
	var offsets []string
	for _, record := range records {
		offsets = append(offsets, strconv.FormatInt(record.Offset, 10))
	}
	return offsets, nil
}

func consume(ctx context.Context, servers kgo.Opt, topic, count string, places []string) ([]string, error) {
	wanted, err := strconv.Atoi(count)
	if err != nil {
		return nil, err
	}
	starts := map[int32]kgo.Offset{}
	for _, place := range places {
		var partition int32
		var offset int64
		if _, err := fmt.Sscanf(place, "%d:%d", &partition, &offset); err != nil {
			return nil, err
		}
		starts[partition] = kgo.NewOffset().At(offset)
	}
	client, err := kgo.NewClient(servers, kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: starts}))
	if err != nil {
		return nil, err
	}
	defer client.Close()
	var found []string
	for len(found) < wanted && ctx.Err() == nil {
		fetches := client.PollFetches(ctx)
		if err := fetches.Err(); err != nil && ctx.Err() == nil {
			return nil, err
		}
		fetches.EachRecord(func(record *kgo.Record) { found = append(found, printed(record)) })
	}
	return found, nil
}

// member is the process's member of a group.
type member struct {
	client *kgo.Client
	lock   sync.Mutex
	has    map[int32]bool
}

var joined = &member{has: map[int32]bool{}}

func (m *member) join(servers kgo.Opt, topic, group, sessionMs string) (err error) {
	protocol, err := protocolOptions(sessionMs)
	if err != nil {
		return err
	}
	change := func(has bool) func(context.Context, *kgo.Client, map[string][]int32) {
		return func(_ context.Context, _ *kgo.Client, places map[string][]int32) {
			m.lock.Lock()
			defer m.lock.Unlock()
			for _, partition := range places[topic] {
				if has {
					m.has[partition] = true
				} else {
					delete(m.has, partition)
				}
			}
		}
	}
	m.client, err = kgo.NewClient(append(
		protocol,
		servers,
		kgo.ConsumerGroup(group),
		kgo.ConsumeTopics(topic),
		kgo.DisableAutoCommit(),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.OnPartitionsAssigned(change(true)),
		kgo.OnPartitionsRevoked(change(false)),
		kgo.OnPartitionsLost(change(false)),
	)...)
	return err
}

// protocolOptions has the consumer protocol with the assignor "uniform", or the classic protocol with a timeout in ms.
func protocolOptions(session string) ([]kgo.Opt, error) {
	if session == "consumer" {
		return []kgo.Opt{kgo.ServerSideBalancer(), kgo.Balancers(kgo.StickyBalancer())}, nil
	}
	milliseconds, err := strconv.Atoi(session)
	return []kgo.Opt{
		kgo.HeartbeatInterval(200 * time.Millisecond),
		kgo.SessionTimeout(time.Duration(milliseconds) * time.Millisecond),
	}, err
}

func (m *member) poll(milliseconds string) ([]string, error) {
	count, err := strconv.Atoi(milliseconds)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(count)*time.Millisecond)
	defer cancel()
	fetches := m.client.PollFetches(ctx)
	if err := fetches.Err(); err != nil && ctx.Err() == nil {
		return nil, err
	}
	m.lock.Lock()
	defer m.lock.Unlock()
	var words []string
	for partition := range m.has {
		words = append(words, strconv.Itoa(int(partition)))
	}
	words = append(words, "|")
	fetches.EachRecord(func(record *kgo.Record) {
		words = append(words, fmt.Sprintf("%d,%d", record.Partition, record.Offset))
	})
	return words, nil
}

func offsetAt(ctx context.Context, servers kgo.Opt, topic, partition, timestamp string) ([]string, error) {
	number, err := strconv.ParseInt(partition, 10, 32)
	if err != nil {
		return nil, err
	}
	milliseconds, err := strconv.ParseInt(timestamp, 10, 64)
	if err != nil {
		return nil, err
	}
	client, err := kgo.NewClient(servers)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	listed, err := kadm.NewClient(client).ListOffsetsAfterMilli(ctx, milliseconds, topic)
	if err != nil {
		return nil, err
	}
	offset, ok := listed.Lookup(topic, int32(number))
	if !ok || offset.Err != nil {
		return nil, fmt.Errorf("no answer for %s-%d: %v", topic, number, offset.Err)
	}
	return []string{strconv.FormatInt(offset.Offset, 10)}, nil
}

func parsed(word string) (*kgo.Record, error) {
	fields := strings.Split(word, ",")
	timestamp, err := strconv.ParseInt(fields[0], 10, 64)
	if err != nil {
		return nil, err
	}
	record := &kgo.Record{Timestamp: time.UnixMilli(timestamp)}
	if record.Key, err = decoded(fields[1]); err != nil {
		return nil, err
	}
	if record.Value, err = decoded(fields[2]); err != nil {
		return nil, err
	}
	for _, field := range fields[3:] {
		name, value, _ := strings.Cut(field, ":")
		key, err := decoded(name)
		if err != nil {
			return nil, err
		}
		data, err := decoded(value)
		if err != nil {
			return nil, err
		}
		record.Headers = append(record.Headers, kgo.RecordHeader{Key: string(key), Value: data})
	}
	return record, nil
}

func printed(record *kgo.Record) string {
	fields := []string{
		strconv.FormatInt(int64(record.Partition), 10),
		strconv.FormatInt(record.Offset, 10),
		strconv.FormatInt(record.Timestamp.UnixMilli(), 10),
		encoded(record.Key),
		encoded(record.Value),
	}
	for _, header := range record.Headers {
		fields = append(fields, encoded([]byte(header.Key))+":"+encoded(header.Value))
	}
	return strings.Join(fields, ",")
}

func encoded(data []byte) string {
	if data == nil {
		return "-"
	}
	if len(data) == 0 {
		return "="
	}
	return base64.StdEncoding.EncodeToString(data)
}

func decoded(word string) ([]byte, error) {
	if word == "-" {
		return nil, nil
	}
	if word == "=" {
		return []byte{}, nil
	}
	return base64.StdEncoding.DecodeString(word)
}
