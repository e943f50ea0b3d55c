import java.util.Collections;
import java.util.List;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/** Of clients of before 0.11: no admin client, no headers. */
final class Features {
    private Features() {}

    static void create(String servers, String topic, int partitions) {
        try (KafkaProducer<byte[], byte[]> producer = new KafkaProducer<>(
                Driver.settings(servers), new ByteArraySerializer(), new ByteArraySerializer())) {
            producer.partitionsFor(topic);
        }
    }

    static ProducerRecord<byte[], byte[]> record(
            String topic, int partition, long timestamp, byte[] key, byte[] value, String[] headers) {
        return new ProducerRecord<>(topic, partition, timestamp, key, value);
    }

    static List<String> headers(ConsumerRecord<byte[], byte[]> record) {
        return Collections.emptyList();
    }

    static ConsumerRecords<byte[], byte[]> poll(KafkaConsumer<byte[], byte[]> consumer, int milliseconds) {
        return consumer.poll(milliseconds);
    }
}
