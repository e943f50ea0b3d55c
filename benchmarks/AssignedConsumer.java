// Reads RECORDS records of a topic from the beginning, all partitions assigned, with the settings of ConsumerPerformance.
//
//     java -cp 'LIBS/*:CLASSES' AssignedConsumer BOOTSTRAP TOPIC RECORDS    prints records a second

import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.stream.Collectors;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

public class AssignedConsumer {
    private static final long SECONDS_WITHOUT_RECORDS = 30;

    public static void main(String[] arguments) {
        String topic = arguments[1];
        long wanted = Long.parseLong(arguments[2]);
        Map<String, Object> settings = Map.of(
                "bootstrap.servers", arguments[0],
                "receive.buffer.bytes", 2 * 1024 * 1024,
                "max.partition.fetch.bytes", 1024 * 1024,
                "check.crcs", false,
                "enable.auto.commit", false,
                "key.deserializer", ByteArrayDeserializer.class,
                "value.deserializer", ByteArrayDeserializer.class);
        try (KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(settings)) {
            List<TopicPartition> partitions = consumer.partitionsFor(topic).stream()
                    .map(found -> new TopicPartition(topic, found.partition()))
                    .collect(Collectors.toList());
            long started = System.nanoTime();
            long last = started;
            consumer.assign(partitions);
            consumer.seekToBeginning(partitions);
            long records = 0;
            long bytes = 0;
            while (records < wanted) {
                for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(100))) {
                    records++;
                    bytes += record.value().length;
                    last = 0;
                }
                long now = System.nanoTime();
                if (last == 0) {
                    last = now;
                } else if (now - last > SECONDS_WITHOUT_RECORDS * 1_000_000_000L) {
                    throw new IllegalStateException("only " + records + " of " + wanted + " records have come");
                }
            }
            double seconds = (System.nanoTime() - started) / 1e9;
            System.out.printf("%d records, %d bytes: %.1f%n", records, bytes, records / seconds);
        }
    }
}
