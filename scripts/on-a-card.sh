#!/bin/sh
# All that waits for a GPU, in the order of what it decides: is it right, how does it stand beside others, does the plan
# hold on a small card. On a machine of 16 cores it was laid out for 9 minutes; each part ends by itself.
#
# usage: on-a-card.sh FOLDER RESULTS    FOLDER: on the drive; RESULTS: where results and logs go
#
# The package, its tests and the peers (torchao, deepspeed) are installed or on PYTHONPATH; a checkout is the working
# folder. SIZE, TOKENS, PEERS and CARD_ARGS make everything small enough to try the script itself without a GPU.
folder=$1 results=$2 failed=0
part() {
  limit=$1 name=$2
  shift 2
  echo "== $name"
  timeout "$limit" "$@" >"$results/$name.log" 2>&1 || { echo "$name ended with $?"; failed=1; }
  tail -n 25 "$results/$name.log"
}
mkdir -p "$results"
part 120 verify python3 -m nvme_offload.perf.cli verify --path "$folder"
part 120 gpu-tests python3 -m pytest -q -x -m gpu tests
part 300 compare python3 -m nvme_offload.perf.experiments compare --path "$folder" --save "$results" --quads 1 \
  --size "${SIZE:-20x2048}" --tokens "${TOKENS:-32768}" ${PEERS:-}
part 240 card python3 -m scripts.card --path "$folder" --memory 24GiB ${CARD_ARGS:-}
exit $failed
