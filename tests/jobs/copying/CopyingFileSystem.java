import java.io.IOException;
import java.net.URI;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.Paths;
import java.util.Arrays;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.DelegateToFileSystem;
import org.apache.hadoop.fs.FileStatus;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.FileUtil;
import org.apache.hadoop.fs.RawLocalFileSystem;

/**
 * copying:///PATH is a local path where a folder is renamed as object stores do it: each file is copied, in the order of
 * their names, then the folder is deleted. While copying.stop is a file that holds a number, the JVM dies when so many files
 * of a batch have been copied (0: before the first, -1: after the last, before the folder is deleted).
 */
public class CopyingFileSystem extends RawLocalFileSystem {
    @Override
    public URI getUri() {
        return URI.create("copying:///");
    }

    @Override
    public String getScheme() {
        return "copying";
    }

    @Override
    public boolean rename(org.apache.hadoop.fs.Path source, org.apache.hadoop.fs.Path target) throws IOException {
        if (!getFileStatus(source).isDirectory() || !target.getName().startsWith("batch=")) {
            return super.rename(source, target);
        }
        mkdirs(target);
        FileStatus[] files = listStatus(source);
        Arrays.sort(files);
        int copied = 0;
        for (FileStatus file : files) {
            dieAt(copied++);
            FileUtil.copy(this, file.getPath(), this, new org.apache.hadoop.fs.Path(target, file.getPath().getName()),
                false, getConf());
        }
        dieAt(-1);
        return delete(source, true);
    }

    private void dieAt(int copied) throws IOException {
        Path stop = Paths.get(getConf().get("copying.stop"));
        if (Files.exists(stop) && Integer.parseInt(new String(Files.readAllBytes(stop)).trim()) == copied) {
            Files.delete(stop);
            Runtime.getRuntime().halt(137);
        }
    }

    /** For FileContext. */
    public static class Abstract extends DelegateToFileSystem {
        public Abstract(URI uri, Configuration conf) throws Exception {
            super(uri, FileSystem.get(uri, conf), conf, "copying", false);
        }
    }
}
