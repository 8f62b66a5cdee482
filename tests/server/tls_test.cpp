// TLS: requests through it, and certificates that change while the server runs.
#include <gmock/gmock.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <fstream>

#include "server/server_fixture.h"
#include "support/support.h"

namespace cachalot::test {
namespace {

// A self-signed certificate for `name`, as PEM files cert.pem and key.pem.
void write_certificate(const std::filesystem::path& folder, const char* name) {
  EVP_PKEY* key = EVP_EC_gen("P-256");
  X509* certificate = X509_new();
  ASN1_INTEGER_set(X509_get_serialNumber(certificate), 1);
  X509_gmtime_adj(X509_getm_notBefore(certificate), -3600);
  X509_gmtime_adj(X509_getm_notAfter(certificate), 3600);
  X509_set_pubkey(certificate, key);
  X509_NAME* subject = X509_get_subject_name(certificate);
  X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_ASC, reinterpret_cast<const unsigned char*>(name), -1, -1, 0);
  X509_set_issuer_name(certificate, subject);
  ASSERT_GT(X509_sign(certificate, key, EVP_sha256()), 0);
  FILE* file = std::fopen((folder / "cert.pem").c_str(), "w");
  PEM_write_X509(file, certificate);
  std::fclose(file);
  file = std::fopen((folder / "key.pem").c_str(), "w");
  PEM_write_PrivateKey(file, key, nullptr, nullptr, 0, nullptr, nullptr);
  std::fclose(file);
  X509_free(certificate);
  EVP_PKEY_free(key);
}

struct TlsAnswer {
  std::string name, bytes;
};

// One request on a connection of its own; the name in the server's certificate.
TlsAnswer ask(int port, const std::string& request) {
  TlsAnswer out;
  HttpClient socket(port);
  SSL_CTX* context = SSL_CTX_new(TLS_client_method());
  SSL* ssl = SSL_new(context);
  SSL_set_fd(ssl, socket.descriptor());
  if (SSL_connect(ssl) == 1) {
    X509* certificate = SSL_get1_peer_certificate(ssl);
    char name[64] = {};
    X509_NAME_get_text_by_NID(X509_get_subject_name(certificate), NID_commonName, name, sizeof name);
    out.name = name;
    X509_free(certificate);
    SSL_write(ssl, request.data(), static_cast<int>(request.size()));
    char buffer[4096];
    for (int n = 0; (n = SSL_read(ssl, buffer, sizeof buffer)) > 0;) out.bytes.append(buffer, static_cast<size_t>(n));
  }
  SSL_free(ssl);
  SSL_CTX_free(context);
  return out;
}

TEST(Tls, AnswersAndTakesNewCertificates) {
  const TempDir folder;
  write_certificate(folder.path(), "first");
  FixtureOptions options;
  options.server.http.tls_certificate = folder.path() / "cert.pem";
  options.server.http.tls_key = folder.path() / "key.pem";
  ServerFixture fixture(std::move(options));
  const std::string body = R"({"messages":[{"role":"user","content":"hi"}],"stream":true})";
  const std::string request =
      "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: " +
      std::to_string(body.size()) + "\r\n\r\n" + body;
  const TlsAnswer first = ask(fixture.port(), request);
  EXPECT_EQ(first.name, "first");
  EXPECT_THAT(first.bytes, testing::HasSubstr("data: [DONE]"));
  write_certificate(folder.path(), "second");
  EXPECT_EQ(ask(fixture.port(), request).name, "first");
  fixture.server().reload_tls();
  EXPECT_EQ(ask(fixture.port(), request).name, "second");
  std::ofstream(folder.path() / "cert.pem") << "no certificate";
  fixture.server().reload_tls();
  EXPECT_EQ(ask(fixture.port(), request).name, "second") << "a bad file leaves the old one in use";
  HttpClient plain(fixture.port());
  plain.request("GET", "/health");
  EXPECT_TRUE(plain.closed_by_server());
}

TEST(Tls, BadFilesAreNamed) {
  const TempDir folder;
  server::ServerOptions options;
  options.log_level = server::LogLevel::off;
  options.http.port = 0;
  options.http.tls_certificate = folder.path() / "missing.pem";
  EXPECT_THAT(error_of([&] { server::HttpServer(options.http, {}, {}); }), testing::HasSubstr("belong together"));
  options.http.tls_key = folder.path() / "missing.key";
  EXPECT_THAT(error_of([&] { server::HttpServer(options.http, {}, {}); }), testing::HasSubstr("missing.pem"));
}

}  // namespace
}  // namespace cachalot::test
