import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Base64;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndTimestamp;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/** Obeys the lines of process.py by Apache Kafka's client; what its versions do not share is in Features. */
public final class Driver {
    static final int SECONDS = 30;

    private final String servers;
    private final KafkaConsumer<byte[], byte[]> consumer;
    private KafkaConsumer<byte[], byte[]> member;

    private Driver(String servers) {
        this.servers = servers;
        Properties settings = settings(servers);
        settings.put("enable.auto.commit", "false");
        settings.put("auto.offset.reset", "none");
        settings.put("check.crcs", "true");
        settings.put("fetch.max.wait.ms", "50"); // the next request waits for what is on its way for the last
        consumer = new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer());
    }

    static Properties settings(String servers) {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", servers);
        return settings;
    }

    public static void main(String[] arguments) throws Exception {
        PrintStream answers = System.out;
        System.setOut(System.err);
        Driver driver = new Driver(arguments[0]);
        BufferedReader requests = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.US_ASCII));
        for (String line = requests.readLine(); line != null; line = requests.readLine()) {
            String answer;
            try {
                answer = String.join(" ", driver.answer(line.split(" ")));
                answer = answer.isEmpty() ? "ok" : "ok " + answer;
            } catch (Exception error) {
                error.printStackTrace();
                answer = "error " + error.toString().replace('\n', ' ');
            }
            answers.print(answer + "\n");
            answers.flush();
        }
        System.exit(0);
    }

    private List<String> answer(String[] words) throws Exception {
        String topic = words.length > 1 ? words[1] : "";
        switch (words[0]) {
            case "join":
                join(topic, words[2], words[3], words.length > 4 ? words[4] : null);
                return Collections.emptyList();
            case "poll":
                return poll(Integer.parseInt(words[1]));
            case "commit":
                try {
                    member.commitSync();
                } catch (KafkaException error) {
                    return Arrays.asList("refused", error.getClass().getSimpleName());
                }
                return Collections.emptyList();
            case "leave":
                member.close();
                return Collections.emptyList();
            case "create":
                Features.create(servers, topic, Integer.parseInt(words[2]));
                return Collections.emptyList();
            case "produce":
                return produce(topic, Integer.parseInt(words[2]), words[3], Arrays.copyOfRange(words, 4, words.length));
            case "consume":
                return consume(topic, Integer.parseInt(words[2]), Arrays.copyOfRange(words, 3, words.length));
            case "offset-at":
                return offsetAt(new TopicPartition(topic, Integer.parseInt(words[2])), Long.parseLong(words[3]));
            default:
                throw new IllegalArgumentException(words[0]);
        }
    }

    private List<String> produce(String topic, int partition, String codec, String[] records) throws Exception {
        Properties settings = settings(servers);
        settings.put("compression.type", codec);
        settings.put("acks", "all");
        settings.put("linger.ms", "50");
        List<String> offsets = new ArrayList<>();
        try (KafkaProducer<byte[], byte[]> producer =
                new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer())) {
            List<Future<RecordMetadata>> sent = new ArrayList<>();
            for (String record : records) {
                String[] fields = record.split(",");
                String[] headers = Arrays.copyOfRange(fields, 3, fields.length);
                long timestamp = Long.parseLong(fields[0]);
                sent.add(producer.send(
                        Features.record(topic, partition, timestamp, bytes(fields[1]), bytes(fields[2]), headers)));
            }
            producer.flush();
            for (Future<RecordMetadata> entry : sent) {
                offsets.add(Long.toString(entry.get(SECONDS, TimeUnit.SECONDS).offset()));
            }
        }
        return offsets;
    }

    private List<String> consume(String topic, int count, String[] places) {
        Map<TopicPartition, Long> starts = new LinkedHashMap<>();
        for (String place : places) {
            String[] parts = place.split(":");
            starts.put(new TopicPartition(topic, Integer.parseInt(parts[0])), Long.parseLong(parts[1]));
        }
        consumer.assign(starts.keySet());
        starts.forEach((partition, offset) -> consumer.seek(partition, offset));
        List<String> found = new ArrayList<>();
        long deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(SECONDS);
        while (found.size() < count && System.nanoTime() < deadline) {
            for (ConsumerRecord<byte[], byte[]> record : Features.poll(consumer, 500)) {
                List<String> fields = new ArrayList<>(Arrays.asList(
                        Integer.toString(record.partition()),
                        Long.toString(record.offset()),
                        Long.toString(record.timestamp()),
                        word(record.key()),
                        word(record.value())));
                fields.addAll(Features.headers(record));
                found.add(String.join(",", fields));
            }
        }
        return found;
    }

    private void join(String topic, String group, String sessionMs, String assignors) {
        Properties settings = settings(servers);
        if (assignors != null) {
            settings.put("partition.assignment.strategy", assignors);
        }
        settings.put("group.id", group);
        settings.put("enable.auto.commit", "false");
        settings.put("auto.offset.reset", "earliest");
        if (sessionMs.equals("consumer")) {
            settings.put("group.protocol", "consumer");
        } else {
            settings.put("heartbeat.interval.ms", "200");
            settings.put("session.timeout.ms", sessionMs);
        }
        settings.put("fetch.max.wait.ms", "50");
        member = new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer());
        member.subscribe(Collections.singletonList(topic));
    }

    private List<String> poll(int milliseconds) {
        List<String> found = new ArrayList<>();
        for (ConsumerRecord<byte[], byte[]> record : Features.poll(member, milliseconds)) {
            found.add(record.partition() + "," + record.offset());
        }
        List<String> words = new ArrayList<>();
        for (TopicPartition partition : member.assignment()) {
            words.add(Integer.toString(partition.partition()));
        }
        words.add("|");
        words.addAll(found);
        return words;
    }

    private List<String> offsetAt(TopicPartition partition, long timestamp) {
        OffsetAndTimestamp found =
                consumer.offsetsForTimes(Collections.singletonMap(partition, timestamp)).get(partition);
        return Collections.singletonList(found == null ? "-1" : Long.toString(found.offset()));
    }

    static String word(byte[] data) {
        if (data == null) {
            return "-";
        }
        return data.length == 0 ? "=" : Base64.getEncoder().encodeToString(data);
    }

    static byte[] bytes(String word) {
        if (word.equals("-")) {
            return null;
        }
        return word.equals("=") ? new byte[0] : Base64.getDecoder().decode(word);
    }
}
