"""TCP connections for the bytes of weights, beside the calls of `WeightService`.

gRPC in Python copies each byte several times; a socket receives into the memory of the tensor. The
call has everything else: access, order of slices, deltas, small tensors, status.

    call          -> offer of a port and a ticket, then for each message: slices without their data
    connection    <- the ticket, 32 bytes; -> one byte, then the data of these slices, in order

`server`: the port and one stream for each call. `client`: connections to it. `connection`: blocking
reads and writes on a thread. The caller checks digests.
"""

from forge.runtime.weights.bulk.client import BulkClient
from forge.runtime.weights.bulk.connection import BulkConnection, BulkError, BulkUnreachable
from forge.runtime.weights.bulk.server import BulkServer, BulkStream

__all__ = [
    "BulkClient",
    "BulkConnection",
    "BulkError",
    "BulkServer",
    "BulkStream",
    "BulkUnreachable",
]
