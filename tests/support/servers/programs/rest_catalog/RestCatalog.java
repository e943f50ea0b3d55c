package org.apache.iceberg.rest;  // the routes of the adapter are its own

import java.net.InetSocketAddress;
import java.util.HashMap;
import java.util.Map;
import org.apache.hadoop.conf.Configuration;
import org.apache.iceberg.jdbc.JdbcCatalog;
import org.apache.iceberg.rest.credentials.ImmutableCredential;
import org.apache.iceberg.rest.responses.LoadTableResponse;
import org.eclipse.jetty.server.Server;
import org.eclipse.jetty.servlet.ServletContextHandler;
import org.eclipse.jetty.servlet.ServletHolder;

/**
 * Iceberg's REST catalog over its JdbcCatalog: PORT, then properties NAME=VALUE of the catalog.
 *
 * With vended.seconds=N each table comes with keys that end after N seconds, by the properties vended.NAME=VALUE and a
 * token that says when.
 */
public class RestCatalog {
    public static void main(String[] arguments) throws Exception {
        Map<String, String> properties = new HashMap<>();
        Map<String, String> vended = new HashMap<>();
        for (int number = 1; number < arguments.length; number++) {
            String[] pair = arguments[number].split("=", 2);
            boolean isVended = pair[0].startsWith("vended.");
            (isVended ? vended : properties).put(isVended ? pair[0].substring(7) : pair[0], pair[1]);
        }
        JdbcCatalog catalog = new JdbcCatalog();
        catalog.setConf(new Configuration());
        catalog.initialize("rest", properties);
        String seconds = vended.remove("seconds");
        RESTCatalogAdapter adapter =
                seconds == null
                        ? new RESTCatalogAdapter(catalog)
                        : new Vending(catalog, vended, Long.parseLong(seconds));
        Server server = new Server(new InetSocketAddress("127.0.0.1", Integer.parseInt(arguments[0])));
        ServletContextHandler context = new ServletContextHandler();
        context.addServlet(new ServletHolder(new RESTCatalogServlet(adapter)), "/*");
        server.setHandler(context);
        server.start();
        server.join();
    }

    private static class Vending extends RESTCatalogAdapter {
        private final Map<String, String> keys;
        private final long seconds;

        Vending(JdbcCatalog catalog, Map<String, String> keys, long seconds) {
            super(catalog);
            this.keys = keys;
            this.seconds = seconds;
        }

        @Override
        @SuppressWarnings("unchecked")
        public <T extends RESTResponse> T handleRequest(
                Route route, Map<String, String> vars, Object body, Class<T> type) {
            T response = super.handleRequest(route, vars, body, type);
            if (!(response instanceof LoadTableResponse)) {
                return response;
            }
            LoadTableResponse loaded = (LoadTableResponse) response;
            long end = System.currentTimeMillis() + seconds * 1000;
            Map<String, String> given = new HashMap<>(keys);
            given.put("s3.session-token", "until-" + end);
            given.put("s3.session-token-expires-at-ms", Long.toString(end));
            return (T)
                    LoadTableResponse.builder()
                            .withTableMetadata(loaded.tableMetadata())
                            .addAllConfig(loaded.config())
                            .addAllConfig(given)
                            .addCredential(
                                    ImmutableCredential.builder().prefix("s3://").config(given).build())
                            .build();
        }
    }
}
