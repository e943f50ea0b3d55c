import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.consumer.ConsumerGroupMetadata;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

/** Producers with names, and reads, of Apache Kafka's client: obeys the lines of java.py. */
public final class Transactions {
    static final int SECONDS = 30;

    private final String servers;
    private final Map<String, KafkaProducer<String, String>> producers = new HashMap<>();

    private Transactions(String servers) {
        this.servers = servers;
    }

    public static void main(String[] arguments) throws Exception {
        PrintStream answers = System.out;
        System.setOut(System.err);
        Transactions program = new Transactions(arguments[0]);
        BufferedReader requests = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.US_ASCII));
        for (String line = requests.readLine(); line != null; line = requests.readLine()) {
            String answer;
            try {
                List<String> words = program.answer(line.split(" "));
                answer = words.isEmpty() ? "ok" : "ok " + String.join(" ", words);
            } catch (Exception error) {
                error.printStackTrace();
                Throwable cause = error instanceof java.util.concurrent.ExecutionException ? error.getCause() : error;
                answer = "error " + cause.toString().replace('\n', ' ');
            }
            answers.print(answer + "\n");
            answers.flush();
        }
        System.exit(0);
    }

    private Properties settings(String[] words, int from) {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", servers);
        for (String word : Arrays.copyOfRange(words, from, words.length)) {
            String[] parts = word.split("=", 2);
            settings.put(parts[0], parts[1]);
        }
        return settings;
    }

    private List<String> answer(String[] words) throws Exception {
        switch (words[0]) {
            case "open":
                KafkaProducer<String, String> opened =
                        new KafkaProducer<>(settings(words, 2), new StringSerializer(), new StringSerializer());
                producers.put(words[1], opened);
                return Collections.emptyList();
            case "init":
                producers.get(words[1]).initTransactions();
                return Collections.emptyList();
            case "begin":
                producers.get(words[1]).beginTransaction();
                return Collections.emptyList();
            case "commit":
                producers.get(words[1]).commitTransaction();
                return Collections.emptyList();
            case "abort":
                producers.get(words[1]).abortTransaction();
                return Collections.emptyList();
            case "close":
                producers.remove(words[1]).close(Duration.ZERO);
                return Collections.emptyList();
            case "send":
                return send(producers.get(words[1]), words);
            case "offsets":
                producers.get(words[1]).sendOffsetsToTransaction(
                        Collections.singletonMap(
                                new TopicPartition(words[3], Integer.parseInt(words[4])),
                                new OffsetAndMetadata(Long.parseLong(words[5]))),
                        new ConsumerGroupMetadata(words[2]));
                return Collections.emptyList();
            case "read":
                return read(words);
            default:
                throw new IllegalArgumentException(words[0]);
        }
    }

    private List<String> send(KafkaProducer<String, String> producer, String[] words) throws Exception {
        List<Future<RecordMetadata>> sent = new ArrayList<>();
        for (String value : Arrays.copyOfRange(words, 4, words.length)) {
            sent.add(producer.send(new ProducerRecord<>(words[2], Integer.parseInt(words[3]), null, value)));
        }
        producer.flush();
        List<String> offsets = new ArrayList<>();
        for (Future<RecordMetadata> entry : sent) {
            offsets.add(Long.toString(entry.get(SECONDS, TimeUnit.SECONDS).offset()));
        }
        return offsets;
    }

    private List<String> read(String[] words) {
        TopicPartition place = new TopicPartition(words[1], Integer.parseInt(words[2]));
        List<String> found = new ArrayList<>();
        try (KafkaConsumer<String, String> consumer =
                new KafkaConsumer<>(settings(words, 3), new StringDeserializer(), new StringDeserializer())) {
            consumer.assign(Collections.singleton(place));
            consumer.seekToBeginning(Collections.singleton(place));
            long end = consumer.endOffsets(Collections.singleton(place)).get(place);
            while (consumer.position(place) < end) {
                for (ConsumerRecord<String, String> record : consumer.poll(Duration.ofMillis(200))) {
                    found.add(record.value());
                }
            }
        }
        return found;
    }
}
