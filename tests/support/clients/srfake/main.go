// A schema registry in memory: franz-go's srfake.
//
//	srfake HOST:PORT [AUTHORIZATION] [CERTIFICATE KEY AUTHORITY]
//
// It writes a line "listening HOST:PORT", then one for each request: method, path and query. AUTHORIZATION is the
// header that each request must have, "" for any. With certificates it speaks TLS, and wants clients' certificates.
package main

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"

	"github.com/twmb/franz-go/pkg/sr/srfake"
)

func main() {
	var options []srfake.Option
	if len(os.Args) > 2 && os.Args[2] != "" {
		options = append(options, srfake.WithAuth(os.Args[2]))
	}
	registry := srfake.New(options...)
	listener, err := net.Listen("tcp", os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("listening %s\n", listener.Addr())
	handler := http.HandlerFunc(func(writer http.ResponseWriter, request *http.Request) {
		fmt.Printf("%s %s\n", request.Method, request.URL.RequestURI())
		registry.Handler().ServeHTTP(writer, request)
	})
	server := &http.Server{Handler: handler}
	if len(os.Args) < 6 {
		log.Fatal(server.Serve(listener))
	}
	authority, err := os.ReadFile(os.Args[5])
	if err != nil {
		log.Fatal(err)
	}
	clients := x509.NewCertPool()
	clients.AppendCertsFromPEM(authority)
	server.TLSConfig = &tls.Config{ClientCAs: clients, ClientAuth: tls.RequireAndVerifyClientCert}
	log.Fatal(server.ServeTLS(listener, os.Args[3], os.Args[4]))
}
