// An agent in JavaScript, over gRPC. No generated code: the protos are read as they are.
//
//     npm ci --prefix examples/node_grpc
//     forge agents run --command 'node examples/node_grpc/agent.mjs'
//
// The runner sets FORGE_GRPC_ADDR, FORGE_SESSION_TOKEN, FORGE_TASK_JSON and, with TLS, FORGE_TLS_*.
// What is printed last is the answer; what goes to standard error is in the runner's log when the
// program fails.

import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";

import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const env = process.env;
const protos = env.FORGE_PROTOS ?? fileURLToPath(new URL("../../protos", import.meta.url));

function credentials() {
  if (!env.FORGE_TLS_CA) return grpc.credentials.createInsecure();
  const read = (path) => (path ? readFileSync(path) : null);
  return grpc.credentials.createSsl(
    read(env.FORGE_TLS_CA),
    read(env.FORGE_TLS_KEY),
    read(env.FORGE_TLS_CERT),
  );
}

function connect() {
  const definition = protoLoader.loadSync("forge/v1/gateway.proto", {
    includeDirs: [protos],
    keepCase: true,
    enums: String,
  });
  const { GatewayService } = grpc.loadPackageDefinition(definition).forge.v1;
  // Retries while the gateway is busy or restarts; chat then samples again, which is fine.
  const retryPolicy = {
    maxAttempts: 5,
    initialBackoff: "0.1s",
    maxBackoff: "2s",
    backoffMultiplier: 2,
    retryableStatusCodes: ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
  };
  const methodConfig = [{ name: [{ service: "forge.v1.GatewayService" }], retryPolicy }];
  return new GatewayService(env.FORGE_GRPC_ADDR, credentials(), {
    "grpc.service_config": JSON.stringify({ methodConfig }),
    "grpc.enable_http_proxy": 0,
  });
}

const gateway = connect();
const metadata = new grpc.Metadata();
metadata.set("authorization", `Bearer ${env.FORGE_SESSION_TOKEN}`);

// One turn: text is shown as it is sampled, the whole message is returned.
async function chat(messages, maxTokens) {
  const request = { messages, sampling: { max_tokens: maxTokens }, stream: true };
  const deadline = Date.now() + 600_000;
  let answer;
  for await (const response of gateway.Chat(request, metadata, { deadline })) {
    process.stderr.write(response.delta ?? "");
    if (response.message) answer = response.message;
  }
  process.stderr.write("\n");
  return answer;
}

const { messages } = JSON.parse(env.FORGE_TASK_JSON);
const user = (content) => ({ role: "user", content });

const asked = [...messages, user("Think about it first.")];
const thought = await chat(asked, 128);
const answer = await chat([...asked, thought, user("Answer in one line.")], 64);
console.log(answer.content);
gateway.close();
