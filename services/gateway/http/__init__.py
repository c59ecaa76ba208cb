"""HTTP endpoints: the protocols of OpenAI, Anthropic and Gemini, in the event loop of the process.

server.py        routes, error responses, limits
openai/, anthropic/, gemini/   the protocols
edge.py          credentials, model names, JSON and event responses of all protocols
message_parts/, request_fields/   conversions and checks that protocols share
forward.py, relay.py   calls of external APIs
listener/        connections, and one port for several gateways
"""
