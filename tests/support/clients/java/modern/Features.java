import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.TopicDescription;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.header.internals.RecordHeader;

/** Of clients with an admin client and headers. */
final class Features {
    private Features() {}

    static void create(String servers, String topic, int partitions) throws Exception {
        try (Admin admin = Admin.create(Driver.settings(servers))) {
            NewTopic wanted = new NewTopic(topic, partitions, (short) 1);
            admin.createTopics(Collections.singleton(wanted)).all().get(Driver.SECONDS, TimeUnit.SECONDS);
            TopicDescription found = admin.describeTopics(Collections.singleton(topic))
                    .allTopicNames()
                    .get(Driver.SECONDS, TimeUnit.SECONDS)
                    .get(topic);
            if (found.partitions().size() != partitions) {
                throw new IllegalStateException(found.toString());
            }
        }
    }

    static ProducerRecord<byte[], byte[]> record(
            String topic, int partition, long timestamp, byte[] key, byte[] value, String[] headers) {
        List<Header> pairs = new ArrayList<>();
        for (String header : headers) {
            String[] parts = header.split(":");
            String name = new String(Driver.bytes(parts[0]), StandardCharsets.UTF_8);
            pairs.add(new RecordHeader(name, Driver.bytes(parts[1])));
        }
        return new ProducerRecord<>(topic, partition, timestamp, key, value, pairs);
    }

    static List<String> headers(ConsumerRecord<byte[], byte[]> record) {
        List<String> words = new ArrayList<>();
        for (Header header : record.headers()) {
            String name = Driver.word(header.key().getBytes(StandardCharsets.UTF_8));
            words.add(name + ":" + Driver.word(header.value()));
        }
        return words;
    }

    static ConsumerRecords<byte[], byte[]> poll(KafkaConsumer<byte[], byte[]> consumer, int milliseconds) {
        return consumer.poll(Duration.ofMillis(milliseconds));
    }
}
