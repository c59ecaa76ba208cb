"""Discovery, leader election and announced weights, in etcd.

Keys under /forge/<cluster>/: `services/<kind>/<instance>` (leased), `leader/<name>` (leased),
`weights/<policy>/latest`, `config/...`. During an outage of etcd all processes serve on with the
last known view; only elections and publications wait. An instance id belongs to one live process:
a second one is refused. From the wire up:

    etcd_channel    the channel to one of the members, and to the next if that is lost
    etcd            the client: deadlines, snapshot then watch, every failure is Unavailable
    leases          leases with a local deadline, and registration
    leader_election campaigns, and leadership with its fence
    claims          leased keys with one live owner, taken by compare-and-swap
    directory       pure: the view of one kind, and the grace period around an outage
    discovery       follows the changes of one kind
    coordinator     the interface for services
"""

from forge.runtime.coordination.claims import Fields, Owner
from forge.runtime.coordination.coordinator import Coordinator, EtcdStatus
from forge.runtime.coordination.directory import Instance
from forge.runtime.coordination.discovery import Discovery
from forge.runtime.coordination.etcd import Login, Versioned
from forge.runtime.coordination.leader_election import Leadership
from forge.runtime.coordination.leases import Registration

__all__ = [
    "Coordinator",
    "Discovery",
    "EtcdStatus",
    "Fields",
    "Instance",
    "Leadership",
    "Login",
    "Owner",
    "Registration",
    "Versioned",
]
