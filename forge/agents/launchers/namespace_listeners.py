"""Listens in the network of another process: `python -I -S namespace_listeners.py`.

Owns sockets in the network namespace of a sandbox, under the addresses that a gateway has on the
host. The runner accepts on them, so a program reaches the gateway by its usual address, also by
TLS, and nothing else: its namespace has no other interface than the loopback.

Arguments: process id, directory of its root to open ("": none), then hosts and ports by turns. The
descriptors go to the socket of standard input, those of the listeners last.
"""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import os
import socket
import struct
import sys

BACKLOG = 64
_NS_GET_USERNS = 0xB701
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_RTM_NEWADDR = 20
_REQUEST_ACK_CREATE_REPLACE = 0x1 | 0x4 | 0x100 | 0x400
_IFA_ADDRESS, _IFA_LOCAL, _IFA_F_NODAD = 1, 2, 2
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def main() -> None:
    """Sends the descriptors, then ends."""
    channel = socket.socket(fileno=0)
    process, directory, *rest = sys.argv[1:]
    if rest:
        _enter(process)
        _raise_loopback()
    found = []
    if directory:
        found.append(os.open(f"/proc/{process}/root{directory}", os.O_RDONLY | os.O_DIRECTORY))
    listeners = [_listen(host, int(port)) for host, port in zip(rest[::2], rest[1::2], strict=True)]
    socket.send_fds(channel, [b"+"], found + [each.fileno() for each in listeners])


def _enter(process: str) -> None:
    """Joins the network namespace; first the user namespace that owns it, if it is another one."""
    library = ctypes.CDLL(None, use_errno=True)
    network = os.open(f"/proc/{process}/ns/net", os.O_RDONLY)
    owner = fcntl.ioctl(network, _NS_GET_USERNS)
    own, joined = "/proc/self/ns/user", [(network, _CLONE_NEWNET)]
    if os.fstat(owner).st_ino != os.stat(own).st_ino:  # noqa: PTH116 - the import of pathlib takes time
        joined.insert(0, (owner, _CLONE_NEWUSER))
    for namespace, kind in joined:
        if library.setns(namespace, kind):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def _listen(host: str, port: int) -> socket.socket:
    address = ipaddress.ip_address(host)
    if not address.is_loopback:
        _add_address(address)
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


def _add_address(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    """Gives the loopback interface one address more."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    index = socket.if_nametoindex("lo")
    body = struct.pack("BBBBi", family, address.max_prefixlen, _IFA_F_NODAD, 0, index)
    for kind in (_IFA_LOCAL, _IFA_ADDRESS):
        body += struct.pack("HH", 4 + len(address.packed), kind) + address.packed
    header = struct.pack("IHHII", 16 + len(body), _RTM_NEWADDR, _REQUEST_ACK_CREATE_REPLACE, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as routes:
        routes.sendall(header + body)
        (error,) = struct.unpack_from("i", routes.recv(4096), 16)
    if error:
        raise OSError(-error, f"{address}: {os.strerror(-error)}")


if __name__ == "__main__":
    main()
