"""`forge deploy prepare-etcd`: the first start of a member of etcd, on its host.

The installed settings name an existing cluster: an empty disk never makes a second one by itself.
The first start alone has other variables. A reboot keeps them; the unit removes them itself once
the member is ready, since they must not be there when its disk is lost. A member with data ignores
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from forge.cli.deploy.host.file_errors import file_error
from forge.cli.deploy.host.host import systemctl
from forge.runtime.files.private import replace_private_file

DATA = "/var/lib/forge/etcd/member"
VARIABLES = Path("/etc/forge/etcd-start.env")
DROP_IN = Path("/etc/systemd/system/forge-etcd.service.d/90-start.conf")
UNIT = "forge-etcd.service"
# Of several files with one variable the last wins. `-`: it may be gone at a restart. `+`: as root.
_START = f"""[Service]
EnvironmentFile=-{VARIABLES}
ExecStartPost=+/bin/rm -f {DROP_IN} {VARIABLES}
"""


def prepare(state: Literal["new", "existing"], *, members: str = "") -> None:
    """Prepare the next start. `members`: NAME=URL,... of all members, the new one included; without
    them as installed.

    Raises `InvalidArgument` without root, `Unavailable` if systemd refuses.
    """
    lines = [f"ETCD_INITIAL_CLUSTER_STATE={state}"]
    lines += [f"ETCD_INITIAL_CLUSTER={members}"] if members else []
    try:
        DROP_IN.parent.mkdir(parents=True, exist_ok=True)
        replace_private_file(VARIABLES, "\n".join(lines) + "\n")
        replace_private_file(DROP_IN, _START)
    except OSError as error:
        raise file_error(error) from None
    systemctl("daemon-reload")


def finish() -> None:
    """Remove what `prepare` wrote, once the member has data. Raises as `prepare`."""
    try:
        for file in (DROP_IN, VARIABLES):
            file.unlink(missing_ok=True)
    except OSError as error:
        raise file_error(error) from None
    systemctl("daemon-reload")
