import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.OutputStream;
import java.io.PrintStream;
import java.lang.reflect.InvocationTargetException;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.Base64;
import org.apache.kafka.common.utils.Exit;

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
        Exit.Procedure end = (code, message) -> {
            exitCode = exitCode == null ? Integer.valueOf(code) : exitCode;
            throw new Ended();
        };
        Exit.setExitProcedure(end);
        Exit.setHaltProcedure(end);
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

    private static int run(String name, String[] arguments) throws Exception {
        try {
            Class.forName(name).getMethod("main", String[].class).invoke(null, (Object) arguments);
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
