#!/bin/sh
# Three nodes on this machine, of different devices, train one model over TLS: about two minutes.
#     ./run.sh FOLDER
set -eu
folder=${1:?where shall the app go? ./run.sh my-edge}
here=$(cd "$(dirname "$0")" && pwd)

raffm edge init "$folder" --run "$here/run.toml"

# What the nodes can hold: all, what fits 60,000 parameters, and what the machine itself finds.
echo "partition-id=0 num-partitions=3 size='1'" > "$folder/nodes/0.config"
echo "partition-id=1 num-partitions=3 max-params='60k' speed='5G'" > "$folder/nodes/1.config"
echo "partition-id=2 num-partitions=3 auto=true" > "$folder/nodes/2.config"

trap 'kill $started 2>/dev/null || true; wait' EXIT INT TERM
. "$folder/env.sh"
cd "$folder"
./link.sh > link.log 2>&1 & started=$!
until flwr supernode list here > /dev/null 2>&1; do sleep 1; done
for number in 0 1 2; do
    flwr supernode register "certs/node$number.pub" here > /dev/null  # a node whose key is not known ends at once
    ./node.sh "$number" > "node$number.log" 2>&1 & started="$started $!"
done
flwr run . here --stream
cat run/metrics.md
