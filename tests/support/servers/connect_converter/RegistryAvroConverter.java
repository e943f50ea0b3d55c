import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import io.apicurio.registry.utils.converter.avro.AvroData;
import java.io.ByteArrayOutputStream;
import java.io.DataOutputStream;
import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.HashMap;
import java.util.Map;
import org.apache.avro.Schema;
import org.apache.avro.generic.GenericDatumWriter;
import org.apache.avro.io.BinaryEncoder;
import org.apache.avro.io.EncoderFactory;
import org.apache.kafka.connect.data.SchemaAndValue;
import org.apache.kafka.connect.errors.DataException;
import org.apache.kafka.connect.storage.Converter;

/** Writes Avro as Confluent's AvroConverter does, which Maven's central registry does not have. For sources only. */
public final class RegistryAvroConverter implements Converter {
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final long RETRIES_MS = 60_000;

    private final AvroData data = new AvroData(1000);
    private final HttpClient client = HttpClient.newHttpClient();
    private final Map<String, Integer> ids = new HashMap<>();
    private String url;
    private String ending;

    @Override
    public void configure(Map<String, ?> settings, boolean isKey) {
        url = settings.get("schema.registry.url").toString();
        ending = isKey ? "-key" : "-value";
    }

    @Override
    public byte[] fromConnectData(String topic, org.apache.kafka.connect.data.Schema schema, Object value) {
        if (value == null) {
            return null; // a tombstone
        }
        Schema avro = data.fromConnectSchema(schema);
        try {
            ByteArrayOutputStream bytes = new ByteArrayOutputStream();
            DataOutputStream head = new DataOutputStream(bytes);
            head.writeByte(0);
            head.writeInt(id(topic + ending, avro.toString()));
            BinaryEncoder encoder = EncoderFactory.get().directBinaryEncoder(bytes, null);
            new GenericDatumWriter<Object>(avro).write(data.fromConnectData(schema, value), encoder);
            encoder.flush();
            return bytes.toByteArray();
        } catch (IOException error) {
            throw new DataException(error);
        }
    }

    @Override
    public SchemaAndValue toConnectData(String topic, byte[] value) {
        throw new DataException("for sources only");
    }

    private synchronized int id(String subject, String schema) throws IOException {
        Integer known = ids.get(subject + schema);
        if (known == null) {
            known = register(subject, schema);
            ids.put(subject + schema, known);
        }
        return known;
    }

    /** The registry may be down for a while. */
    private int register(String subject, String schema) throws IOException {
        String body = JSON.createObjectNode().put("schema", schema).toString();
        HttpRequest request = HttpRequest.newBuilder(URI.create(url + "/subjects/" + subject + "/versions"))
                .header("Content-Type", "application/vnd.schemaregistry.v1+json")
                .POST(HttpRequest.BodyPublishers.ofString(body))
                .build();
        long deadline = System.currentTimeMillis() + RETRIES_MS;
        while (true) {
            String trouble;
            try {
                HttpResponse<String> answer = client.send(request, HttpResponse.BodyHandlers.ofString());
                JsonNode told = JSON.readTree(answer.body());
                if (answer.statusCode() == 200) {
                    return told.get("id").asInt();
                }
                trouble = answer.statusCode() + " " + answer.body();
                if (answer.statusCode() < 500) {
                    throw new DataException("the registry refuses " + subject + ": " + trouble);
                }
            } catch (IOException error) {
                trouble = error.toString();
            } catch (InterruptedException error) {
                Thread.currentThread().interrupt();
                throw new DataException(error);
            }
            if (System.currentTimeMillis() > deadline) {
                throw new DataException("the registry does not register " + subject + ": " + trouble);
            }
            try {
                Thread.sleep(200);
            } catch (InterruptedException error) {
                Thread.currentThread().interrupt();
                throw new DataException(error);
            }
        }
    }
}
