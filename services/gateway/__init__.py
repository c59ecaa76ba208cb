"""The agent's side: chat protocols in, exact tokens out.

Floors, each of which imports only what is below: `http` and `service`, `turns`, `sessions` and
`actors`, `structured_output`, `conversation`, `model`; `router` stands beside the last three.
"""
