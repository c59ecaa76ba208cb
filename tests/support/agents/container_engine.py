"""A container engine of this host, and an image for its tests.

Owns the choice of words with which an engine runs here, and an image made without a registry: links
to the system of the host, which a test mounts read-only.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
from functools import cache

IMAGE = "localhost/forge-test:latest"
READ = ("/usr", sys.base_prefix)
"""What a container of this image needs of the host."""
ENGINES = ("podman", "docker")
_WORDS = {"podman": (("podman",), ("podman", "--runtime", "runc")), "docker": (("docker",),)}
_DIRECTORIES = ("dev", "etc", "forge", "proc", "run", "sys", "tmp", "usr")
_LINKS = ("bin", "lib", "lib64", "sbin")
_PROBE = ("run", "--rm", "--network=none", "--pull=never", "--ulimit=nofile=1024:1024",
          "--ulimit=nproc=1024:1024", "--volume=/usr:/usr:ro", IMAGE, "/bin/true")  # fmt: skip


@cache
def engine(name: str) -> tuple[tuple[str, ...], str]:
    """Words with which the engine runs containers here, and "" or why it does not."""
    reasons = [f"{name} is not installed"]
    for words in _WORDS[name]:
        if shutil.which(words[0]) is None or (words[1:] and shutil.which(words[-1]) is None):
            continue
        for arguments, sent in ((("import", "-", IMAGE), _image()), (_PROBE, b"")):
            done = subprocess.run(
                [*words, *arguments], input=sent, capture_output=True, timeout=120
            )
            if done.returncode:
                reasons.append(done.stderr.decode()[-300:])
                break
        else:
            return words, ""
    return (), reasons[-1]


def _image() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in _DIRECTORIES:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for name in _LINKS:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(entry)
    return buffer.getvalue()
