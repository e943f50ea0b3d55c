import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.OutputStream;
import java.io.PrintStream;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Proxy;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.Base64;

/** Runs main methods in one JVM: a line is a class and its arguments, the answer is the exit code and the output. */
public final class Tools {
    private static final class Ended extends RuntimeException {
        Ended() {
            super(null, null, false, false);
        }
    }

    /** Of the first exit: some tools catch all exceptions, ours too, and exit again. */
    private static Integer exitCode;

    /** Scala's console keeps the stream that it finds first: what changes is behind it. */
    private static ByteArrayOutputStream output = new ByteArrayOutputStream();

    public static void main(String[] arguments) throws Exception {
        PrintStream answers = System.out;
        PrintStream told = new PrintStream(
                new OutputStream() {
                    @Override
                    public void write(int one) {
                        output.write(one);
                    }
                },
                true,
                "UTF-8");
        System.setOut(told);
        System.setErr(told);
        catchExits();
        BufferedReader requests = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = requests.readLine(); line != null; line = requests.readLine()) {
            String[] words = line.split("\t");
            output = new ByteArrayOutputStream();
            exitCode = null;
            int code = run(words[0], Arrays.copyOfRange(words, 1, words.length));
            told.flush();
            answers.println(code + " " + Base64.getEncoder().encodeToString(output.toByteArray()));
            answers.flush();
        }
        Runtime.getRuntime().halt(0);
    }

    /** By reflection: Kafka 4.4 has the class in another package than earlier versions. */
    private static void catchExits() throws Exception {
        Class<?> exit;
        try {
            exit = Class.forName("org.apache.kafka.common.utils.Exit");
        } catch (ClassNotFoundException error) {
            exit = Class.forName("org.apache.kafka.common.utils.internals.Exit");
        }
        Class<?> procedure = Class.forName(exit.getName() + "$Procedure");
        Class<?>[] interfaces = {procedure};
        Object end = Proxy.newProxyInstance(procedure.getClassLoader(), interfaces, (proxy, method, arguments) -> {
            exitCode = exitCode == null ? (Integer) arguments[0] : exitCode;
            throw new Ended();
        });
        exit.getMethod("setExitProcedure", procedure).invoke(null, end);
        exit.getMethod("setHaltProcedure", procedure).invoke(null, end);
    }

    /** Kafka 4.4 has those of kafka.tools and kafka.admin in another package. */
    private static Class<?> tool(String name) throws ClassNotFoundException {
        try {
            return Class.forName(name);
        } catch (ClassNotFoundException error) {
            return Class.forName("org.apache.kafka.tools." + name.substring(name.lastIndexOf('.') + 1));
        }
    }

    private static int run(String name, String[] arguments) throws Exception {
        try {
            tool(name).getMethod("main", String[].class).invoke(null, (Object) arguments);
            return 0;
        } catch (InvocationTargetException error) {
            if (error.getCause() instanceof Ended) {
                return exitCode;
            }
            error.getCause().printStackTrace();
            return 1;
        }
    }
}
