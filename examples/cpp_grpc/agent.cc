// An agent in C++, over gRPC, with stubs that the build generates from Forge's protos.
//
//     cmake -S examples/cpp_grpc -B build/cpp_grpc && cmake --build build/cpp_grpc
//     forge agents run --command build/cpp_grpc/agent
//
// The runner sets FORGE_GRPC_ADDR, FORGE_SESSION_TOKEN, FORGE_TASK_JSON and, with TLS,
// FORGE_TLS_*. What is printed last is the answer.

#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "forge/v1/gateway.grpc.pb.h"

namespace {

using forge::v1::ChatMessage;
using Messages = std::vector<ChatMessage>;

std::string FromEnv(const char* name, bool required = true) {
  const char* value = std::getenv(name);
  if (value == nullptr && required) {
    throw std::runtime_error(std::string(name) + " is not set: start this through `forge agents run`");
  }
  return value == nullptr ? "" : value;
}

std::string ReadFile(const std::string& path) {
  if (path.empty()) return "";
  std::ifstream file(path);
  if (!file) throw std::runtime_error(path + " cannot be read");
  return {std::istreambuf_iterator<char>(file), {}};
}

std::shared_ptr<grpc::ChannelCredentials> Credentials() {
  const std::string ca = FromEnv("FORGE_TLS_CA", false);
  if (ca.empty()) return grpc::InsecureChannelCredentials();
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = ReadFile(ca);
  options.pem_private_key = ReadFile(FromEnv("FORGE_TLS_KEY", false));
  options.pem_cert_chain = ReadFile(FromEnv("FORGE_TLS_CERT", false));
  return grpc::SslCredentials(options);
}

std::shared_ptr<grpc::Channel> Connect() {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // Retries while the gateway is busy or restarts; chat then samples again, which is fine.
  arguments.SetServiceConfigJSON(R"({"methodConfig": [{
      "name": [{"service": "forge.v1.GatewayService"}],
      "retryPolicy": {"maxAttempts": 5, "initialBackoff": "0.1s", "maxBackoff": "2s",
                      "backoffMultiplier": 2,
                      "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"]}}]})");
  return grpc::CreateCustomChannel(FromEnv("FORGE_GRPC_ADDR"), Credentials(), arguments);
}

ChatMessage User(const std::string& text) {
  ChatMessage message;
  message.set_role("user");
  message.set_content(text);
  return message;
}

// The messages that the task begins with.
Messages Task() {
  google::protobuf::Struct task;
  const auto status =
      google::protobuf::util::JsonStringToMessage(FromEnv("FORGE_TASK_JSON"), &task);
  if (!status.ok()) throw std::runtime_error("FORGE_TASK_JSON: " + status.ToString());
  Messages messages;
  for (const auto& entry : task.fields().at("messages").list_value().values()) {
    const auto& fields = entry.struct_value().fields();
    messages.push_back(User(fields.at("content").string_value()));
    messages.back().set_role(fields.at("role").string_value());
  }
  return messages;
}

class Session {
 public:
  Session() : gateway_(forge::v1::GatewayService::NewStub(Connect())) {}

  // One turn: text is shown as it is sampled, the whole message is returned.
  ChatMessage Chat(const Messages& messages, unsigned max_tokens) {
    forge::v1::ChatRequest request;
    for (const auto& message : messages) *request.add_messages() = message;
    request.mutable_sampling()->set_max_tokens(max_tokens);
    request.set_stream(true);
    grpc::ClientContext context;
    context.AddMetadata("authorization", "Bearer " + FromEnv("FORGE_SESSION_TOKEN"));
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(10));
    const auto reader = gateway_->Chat(&context, request);
    forge::v1::ChatResponse response;
    ChatMessage answer;
    while (reader->Read(&response)) {
      std::cerr << response.delta() << std::flush;
      if (response.has_message()) answer = response.message();
    }
    std::cerr << std::endl;
    const grpc::Status status = reader->Finish();
    if (!status.ok()) throw std::runtime_error(status.error_message());
    return answer;
  }

 private:
  std::unique_ptr<forge::v1::GatewayService::Stub> gateway_;
};

}  // namespace

int main() {
  try {
    Session session;
    Messages messages = Task();
    messages.push_back(User("Think about it first."));
    messages.push_back(session.Chat(messages, 128));
    messages.push_back(User("Answer in one line."));
    std::cout << session.Chat(messages, 64).content() << std::endl;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
