"""`forge deploy prepare-etcd`: the first start of a member of etcd, on its host.

The installed settings name an existing cluster: an empty disk never makes a second one by itself.
This start alone has other variables, below /run. A member with data ignores them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from forge.cli.deploy.host import systemctl
from forge.core.errors import InvalidArgument

DATA = "/var/lib/forge/etcd/member"
VARIABLES = Path("/run/forge-etcd.env")
DROP_IN = Path("/run/systemd/system/forge-etcd.service.d/90-start.conf")
UNIT = "forge-etcd.service"


def prepare(state: Literal["new", "existing"], *, members: str = "") -> None:
    """Prepare the next start. `members`: NAME=URL,... of all members, the new one included; without
    them as installed.

    Raises `InvalidArgument` without root, `Unavailable` if systemd refuses.
    """
    lines = [f"ETCD_INITIAL_CLUSTER_STATE={state}"]
    lines += [f"ETCD_INITIAL_CLUSTER={members}"] if members else []
    try:
        DROP_IN.parent.mkdir(parents=True, exist_ok=True)
        VARIABLES.write_text("\n".join(lines) + "\n")
        # The last file wins.
        DROP_IN.write_text(f"[Service]\nEnvironmentFile={VARIABLES}\n")
    except OSError as error:
        raise InvalidArgument(f"{error.filename}: {error.strerror}; run it as root") from None
    systemctl("daemon-reload")


def finish() -> None:
    """Remove what `prepare` wrote, once the member has data. Raises as `prepare`."""
    try:
        for file in (DROP_IN, VARIABLES):
            file.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidArgument(f"{error.filename}: {error.strerror}; run it as root") from None
    systemctl("daemon-reload")
