#!/usr/bin/env bash
# Train with a launch config under torchrun. On one node:
#
#   examples/torchrun.sh CONFIG SCRIPT [MEGATRON FLAG ...]
#   examples/torchrun.sh configs/llama3-8b-128k-32gpu.yaml ~/Megatron-LM/pretrain_gpt.py --data-path ... --save ...
#
# With more nodes, run it on each of them with NODE_RANK and MASTER_ADDR set. Flags given here replace the config's.
# PYTHON names the interpreter, MASTER_PORT the port (29500), RUN_FLAGS options of megatron_fcp.run.
set -euo pipefail

if [[ $# -lt 2 ]]; then
    echo "usage: $0 CONFIG SCRIPT [MEGATRON FLAG ...]" >&2
    exit 2
fi
config=$1 script=$2
shift 2
python=${PYTHON:-python}

environment=$("$python" -m megatron_fcp.cli doctor --config "$config" --print env)
eval "$environment" # GPUS, GPUS_PER_NODE, NODES and what the config sets
flags=$("$python" -m megatron_fcp.cli doctor --config "$config" --print flags -- "$@")
mapfile -t flags <<<"$flags"

if [[ $NODES -gt 1 && ( -z ${NODE_RANK:-} || -z ${MASTER_ADDR:-} ) ]]; then
    echo "$0: $config is for $NODES nodes; set NODE_RANK and MASTER_ADDR on each of them" >&2
    exit 2
fi
# RUN_FLAGS is several words.
# shellcheck disable=SC2086
exec "$python" -m torch.distributed.run \
    --nnodes "$NODES" --nproc-per-node "$GPUS_PER_NODE" --node-rank "${NODE_RANK:-0}" \
    --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" \
    -m megatron_fcp.run ${RUN_FLAGS:-} "$script" "${flags[@]}"
