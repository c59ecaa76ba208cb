"""Where everybody is, who leads, and which weights are the latest: etcd, made safe to rest on.

Keys under /forge/<cluster>/: `services/<kind>/<instance>` (leased), `leader/<name>` (leased),
`weights/<policy>/latest`, `config/...`. An etcd outage stops nothing that runs: the last known
view stays, only new elections and publications wait. An instance id belongs to one live process:
a second one is refused. The parts, from the wire up:

    etcd        the client: deadlines, snapshot-then-watch, one name for every failure
    leases      leases with a local deadline; a registration and leadership, each held by one
    claims      leased keys with one live owner, taken by compare-and-swap
    directory   pure: the view of one kind, and the grace around an outage
    discovery   following the changes of one kind
    coordinator the whole, as a service uses it
"""

from forge.runtime.coordination.claims import Fields, Owner
from forge.runtime.coordination.coordinator import Coordinator
from forge.runtime.coordination.directory import Instance
from forge.runtime.coordination.discovery import Discovery
from forge.runtime.coordination.etcd import Versioned
from forge.runtime.coordination.leases import Leadership, Registration

__all__ = [
    "Coordinator",
    "Discovery",
    "Fields",
    "Instance",
    "Leadership",
    "Owner",
    "Registration",
    "Versioned",
]
