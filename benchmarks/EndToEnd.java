// Sends a message every 1/RATE of a second, whatever becomes of those before, and polls in another thread, with an
// assigned partition. The latency is from the time at which a message was to be sent to the return of the poll that
// brings it: a broker that stalls is charged for all messages that were due meanwhile.
//
//     java -cp 'LIBS/*:CLASSES' EndToEnd BOOTSTRAP TOPIC RATE WARM_UP MESSAGES    prints the 50th and the 99th percentile, ms

import java.nio.ByteBuffer;
import java.time.Duration;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.concurrent.atomic.AtomicReference;
import java.util.concurrent.locks.LockSupport;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

public class EndToEnd {
    private static final int SIZE = 100;
    private static final long SECONDS_WITHOUT_RECORDS = 30;

    public static void main(String[] arguments) throws Exception {
        TopicPartition partition = new TopicPartition(arguments[1], 0);
        long pause = 1_000_000_000L / Integer.parseInt(arguments[2]);
        int warmUp = Integer.parseInt(arguments[3]);
        int total = warmUp + Integer.parseInt(arguments[4]);
        try (KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(Map.of(
                        "bootstrap.servers", arguments[0],
                        "enable.auto.commit", false,
                        "key.deserializer", ByteArrayDeserializer.class,
                        "value.deserializer", ByteArrayDeserializer.class));
                KafkaProducer<byte[], byte[]> producer = new KafkaProducer<>(Map.of(
                        "bootstrap.servers", arguments[0],
                        "acks", "1",
                        "key.serializer", ByteArraySerializer.class,
                        "value.serializer", ByteArraySerializer.class))) {
            consumer.assign(List.of(partition));
            consumer.seekToEnd(List.of(partition));
            consumer.position(partition);
            producer.partitionsFor(partition.topic());
            AtomicReference<Exception> failed = new AtomicReference<>();
            Thread sender = new Thread(() -> send(producer, partition, pause, total, failed));
            sender.start();
            long[] latencies = receive(consumer, total, failed);
            sender.join();
            long[] counted = Arrays.copyOfRange(latencies, warmUp, total);
            Arrays.sort(counted);
            System.out.printf("%.3f %.3f%n", percentile(counted, 0.5), percentile(counted, 0.99));
        }
    }

    private static void send(
            KafkaProducer<byte[], byte[]> producer,
            TopicPartition partition,
            long pause,
            int total,
            AtomicReference<Exception> failed) {
        long due = System.nanoTime();
        for (int number = 0; number < total && failed.get() == null; number++) {
            due += pause;
            for (long left = due - System.nanoTime(); left > 0; left = due - System.nanoTime()) {
                LockSupport.parkNanos(left);
            }
            byte[] value = ByteBuffer.allocate(SIZE).putLong(due).array();
            producer.send(new ProducerRecord<>(partition.topic(), partition.partition(), null, value), (sent, error) -> {
                if (error != null) {
                    failed.set(error);
                }
            });
        }
    }

    private static long[] receive(
            KafkaConsumer<byte[], byte[]> consumer, int total, AtomicReference<Exception> failed) throws Exception {
        long[] latencies = new long[total];
        long last = System.nanoTime();
        for (int received = 0; received < total; ) {
            var records = consumer.poll(Duration.ofMillis(100));
            long now = System.nanoTime();
            for (ConsumerRecord<byte[], byte[]> record : records) {
                latencies[received++] = now - ByteBuffer.wrap(record.value()).getLong();
                last = now;
            }
            if (failed.get() != null) {
                throw failed.get();
            }
            if (now - last > SECONDS_WITHOUT_RECORDS * 1_000_000_000L) {
                failed.set(new IllegalStateException("only " + received + " of " + total + " messages have come"));
            }
        }
        return latencies;
    }

    private static double percentile(long[] sorted, double part) {
        return sorted[(int) (sorted.length * part)] / 1e6;
    }
}
