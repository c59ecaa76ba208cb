"""gRPC between processes: server, channels, retry over discovery, status codes, chunks."""

from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.chunks import CHUNK_BYTES, Joiner, split
from forge.runtime.rpc.remote import Remote
from forge.runtime.rpc.server import RpcServer, current_claims
from forge.runtime.rpc.status import from_rpc_error, to_status, translated

__all__ = [
    "CHUNK_BYTES",
    "Channels",
    "Joiner",
    "Remote",
    "RpcServer",
    "current_claims",
    "from_rpc_error",
    "split",
    "to_status",
    "translated",
]
