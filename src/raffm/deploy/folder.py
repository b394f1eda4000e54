"""A folder that `flwr run` takes: the app, and for a trial on one machine certificates, keys and scripts."""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from raffm.deploy.keys import LOCAL, write_certificates, write_node_key
from raffm.errors import RunError

PORT = 8443

SPECIAL = '"$`\\{}'
"""What would not stay as it is within a shell's quotation marks, in TOML, or in the scripts' own patterns."""

CLIENT = '''"""A node: trains its own submodel on its own data, which never leave it."""

from pathlib import Path

from raffm.edge import node

app = node(Path(__file__).with_name("run.toml"))
'''

SERVER = '''"""The server: gives every node the submodel it can hold, and adds up what comes back."""

from pathlib import Path

from raffm.edge import server

app = server(Path(__file__).with_name("run.toml"))
'''

ENVIRONMENT = """# Sourced by the scripts, and by you before `flwr`: nothing is reached but the addresses that are configured.
export RAFFM_APP="${{RAFFM_HERE:-{folder}}}"
export FLWR_HOME="$RAFFM_APP/home"
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
export HF_HUB_OFFLINE="${{HF_HUB_OFFLINE:-1}}"                     # models and data are files here; 0 lets the hub be asked
export RAFFM_CACHE="${{RAFFM_CACHE:-$RAFFM_APP/cache}}"
export PATH="{programs}:$PATH"    # where flwr and flower-supernode are: on another machine, its own
"""

TLS = """--ssl-ca-certfile "$RAFFM_APP/certs/ca.crt" --ssl-certfile "$RAFFM_APP/certs/{name}.pem" \\
  --ssl-keyfile "$RAFFM_APP/certs/{name}.key\""""

LINK = """#!/bin/sh
# The server's end of the network. It runs until it is stopped (Ctrl-C).
# Whoever reaches its port can also command runs: see "The control API" in raffm's docs/edge.md before you open it to others.
RAFFM_HERE="$(cd "$(dirname "$0")" && pwd)"
. "$RAFFM_HERE/env.sh"
mkdir -p "$RAFFM_APP/work" && cd "$RAFFM_APP/work" || exit 1
exec flower-superlink {server_tls} --enable-supernode-auth --host {listens} --port {port} --database "$RAFFM_APP/state.db" \\
  --disable-runtime-dependency-installation "$@"
"""

NODE = """#!/bin/sh
# One node: ./node.sh 0. What it has and can hold stands in nodes/0.config. It runs until it is stopped (Ctrl-C).
RAFFM_HERE="$(cd "$(dirname "$0")" && pwd)"
. "$RAFFM_HERE/env.sh"
number=${{1:?which node? ./node.sh 0}}
shift
mkdir -p "$RAFFM_APP/work" && cd "$RAFFM_APP/work" || exit 1
exec flower-supernode --superlink {host}:{port} --root-certificates "$RAFFM_APP/certs/ca.crt" {local_tls} \\
  --auth-supernode-private-key "$RAFFM_APP/certs/node$number" --port $(({port} + 1 + number)) \\
  --node-config "$(cat "$RAFFM_APP/nodes/$number.config")" "$@"
"""

CONNECTIONS = """[superlink]
default = "here"

[superlink.here]
address = "127.0.0.1:{port}"
root-certificates = "{folder}/certs/ca.crt"

[superlink.simulation]
address = ":local-in-memory:"
options.num-supernodes = {nodes}
options.backend.client-resources.num-cpus = 1
"""

README = """# {name}

A Flower app, written by `raffm edge init`. `{package}/run.toml` says what is trained; `nodes/*.config` what every node has
and can hold.

## {nodes} nodes on this machine

The server's end, in a terminal of its own:

```sh
./link.sh
```

Once, tell it whose keys it may trust (a node whose key it does not know ends at once):

```sh
. ./env.sh
for key in certs/node*.pub; do flwr supernode register "$key" here; done
```

The nodes, each in a terminal of its own:

```sh
./node.sh 0        # and 1, 2, ...
```

and for every run:

```sh
. ./env.sh
flwr run . here --stream
```

Results, report, checkpoint and submodels go into `run/`. After a crash: `flwr run . here --stream -c "resume=true"`.
Stop `link.sh` and `node.sh` with Ctrl-C.

Without any network, in Flower's simulation (`pip install "flwr[simulation]"`): `flwr run . simulation --stream`.

## Several machines

`raffm edge init --host NAME` makes certificates for the name or address under which nodes reach this machine. A node's
machine needs raffm and these files: `tar czf node0.tgz env.sh node.sh nodes/0.config certs/ca.crt certs/local.* certs/node0`.
raffm's `docs/edge.md` goes on from here: systemd units, crashes, and how to keep the control API closed.
"""


def write_app(folder: Path, run: Mapping[str, Any], configs: Sequence[str], port: int = PORT, host: str = "127.0.0.1") -> None:
    """Write everything into a new folder. `run` is the content of a run.toml, `configs` holds the config of every node.

    `host` is where nodes reach the server: its own machine, unless it is told to listen on all its addresses.
    """
    folder = folder.absolute()
    if folder.is_file() or set(str(folder)) & set(SPECIAL):
        raise RunError(
            f"{str(folder)!r} is a file, or has one of {SPECIAL} in it, which scripts read otherwise. Choose another."
        )
    if not re.fullmatch(r"[A-Za-z0-9.:_-]+", host):
        raise RunError(f"--host is {host!r}; give the name or the address of this machine.")
    if folder.exists() and any(folder.iterdir()):
        raise RunError(f"{str(folder)!r} is not empty. Choose a new folder.")
    package = package_of(folder.name)
    given = {
        "folder": folder,
        "programs": Path(sys.executable).parent,
        "host": host,
        "listens": host if host in LOCAL else "0.0.0.0",
        "port": port,
        "nodes": len(configs),
        "server_tls": TLS.format(name="server"),
        "local_tls": TLS.format(name="local"),
    }
    texts = {
        f"{package}/__init__.py": "",
        f"{package}/client_app.py": CLIENT,
        f"{package}/server_app.py": SERVER,
        f"{package}/run.toml": tomli_w.dumps(run),
        "pyproject.toml": tomli_w.dumps(project(package, folder, len(configs))),
        "README.md": README.format(name=folder.name, package=package, nodes=len(configs)),
        "env.sh": ENVIRONMENT.format(**given),
        "link.sh": LINK.format(**given),
        "node.sh": NODE.format(**given),
        "home/config.toml": CONNECTIONS.format(**given),
        ".gitignore": "cache/\ncerts/\nhome/\nrun/\nwork/\nstate.db*\n",
        **{f"nodes/{number}.config": f"{config}\n" for number, config in enumerate(configs)},
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    for script in ("link.sh", "node.sh"):
        (folder / script).chmod(0o755)
    write_certificates(folder / "certs", tuple(dict.fromkeys((host, *LOCAL))))
    for number in range(len(configs)):
        write_node_key(folder / "certs" / f"node{number}")


def project(package: str, folder: Path, nodes: int) -> dict[str, Any]:
    """The pyproject.toml of an app."""
    app = {
        "publisher": "raffm",
        "components": {"serverapp": f"{package}.server_app:app", "clientapp": f"{package}.client_app:app"},
        "config": {"nodes": nodes, "patience": 120.0, "deadline": 3600.0, "folder": str(folder / "run"), "resume": False},
    }
    about = {"version": "1.0.0", "description": "A run of raffm across machines.", "license": "Apache-2.0", "dependencies": []}
    return {
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "project": {"name": package.replace("_", "-"), **about},
        "tool": {"hatch": {"build": {"targets": {"wheel": {"packages": ["."]}}}}, "flwr": {"app": app}},
    }


def package_of(name: str) -> str:
    """A package's name that no other app is likely to have: Flower's simulation confuses apps of one name."""
    plain = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    return f"raffm_edge_{plain or f'{zlib.crc32(name.encode()):08x}'}"
