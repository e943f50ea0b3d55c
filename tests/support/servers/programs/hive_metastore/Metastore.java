import org.apache.hadoop.hive.conf.HiveConf;
import org.apache.hadoop.hive.metastore.HiveMetaStore;
import org.apache.hadoop.hive.metastore.txn.TxnDbUtil;

/** Hive's metastore, for whose locks there are tables before it starts; its settings are properties of the JVM. */
public class Metastore {
    public static void main(String[] arguments) throws Throwable {
        TxnDbUtil.prepDb(new HiveConf());
        HiveMetaStore.main(arguments);
    }
}
