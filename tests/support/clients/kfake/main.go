// A broker in memory: franz-go's kfake.
//
//	kfake
//
// It writes a line "listening HOST:PORT", and ends with its standard input.
package main

import (
	"fmt"
	"io"
	"log"
	"os"
	"strings"

	"github.com/twmb/franz-go/pkg/kfake"
)

func main() {
	cluster, err := kfake.NewCluster(
		kfake.NumBrokers(1),
		kfake.AllowAutoTopicCreation(),
		kfake.DefaultNumPartitions(1),
		kfake.BrokerConfigs(map[string]string{"group.consumer.heartbeat.interval.ms": "100"}),
	)
	if err != nil {
		log.Fatal(err)
	}
	defer cluster.Close()
	fmt.Printf("listening %s\n", strings.Join(cluster.ListenAddrs(), ","))
	_, _ = io.Copy(io.Discard, os.Stdin)
}
