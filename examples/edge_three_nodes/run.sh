#!/bin/sh
# Three nodes on this machine, of different devices, train one model over TLS: about two minutes.
#     ./run.sh FOLDER
set -eu
folder=${1:?where shall the app go? ./run.sh my-edge}
here=$(cd "$(dirname "$0")" && pwd)

raffm edge init "$folder" --run "$here/run.toml" ${PORT:+--port "$PORT"}
cp "$here"/nodes/*.config "$folder/nodes/"

started=""
trap 'kill $started 2>/dev/null || true; wait' EXIT
trap 'exit 1' INT TERM
. "$folder/env.sh"
cd "$folder"
./link.sh > link.log 2>&1 & link=$! started=$!
until flwr supernode list here > /dev/null 2>&1; do
    kill -0 "$link" 2>/dev/null || { tail -5 link.log; exit 1; }
    sleep 1
done
for number in 0 1 2; do
    flwr supernode register "certs/node$number.pub" here > /dev/null  # a node whose key is not known ends at once
    ./node.sh "$number" > "node$number.log" 2>&1 & started="$started $!"
done
flwr run . here --stream
cat run/metrics.md
