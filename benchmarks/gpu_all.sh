#!/usr/bin/env bash
# Everything that needs a GPU, in one call of under 9 minutes, on a machine with PyTorch and numpy and nothing else to
# download: adapters against float64, stream hazards, kernel speeds, overlap, replay, host overhead.
#
#   bash benchmarks/gpu_all.sh OUT [PACKAGES] [DEVICE]
#
# OUT gets logs and JSON. PACKAGES is a folder put on the path (`pip install --target PACKAGES pytest numba`); without
# pytest the checks run through benchmarks/gpu_check.py, without numba plans take longer. DEVICE cpu tries the scripts.
set -u
here="$(cd "$(dirname "$0")" && pwd)"
out="${1:?usage: gpu_all.sh OUT [PACKAGES] [DEVICE]}"
device="${3:-cuda}"
python="${PYTHON:-python3}"
mkdir -p "$out" && out="$(cd "$out" && pwd)"
export PYTHONPATH="$here/..:${2:+$2:}${PYTHONPATH:-}"
cd "$here/.." || exit 2
ranks=256
if ! "$python" -c 'import numba' 2>/dev/null; then
    export PYTHONPATH="$PYTHONPATH:$here/without_numba"
    ranks=32 # planning in plain Python would not be done in time
fi
failed=0

step() { # step NAME SECONDS COMMAND...
    local name="$1" limit="$2" begin=$SECONDS
    shift 2
    timeout -k 10 "$limit" "$@" >"$out/$name.log" 2>&1
    local status=$?
    [ $status -eq 0 ] || failed=1
    echo "$name: exit status $status after $((SECONDS - begin)) s ($out/$name.log)"
    tail -n 3 "$out/$name.log" | cut -c1-200 | sed 's/^/    /'
}

if [ "$device" = cuda ]; then
    nvidia-smi >"$out/nvidia-smi.log" 2>&1 || echo "nvidia-smi does not work here"
    if "$python" -c 'import pytest' 2>/dev/null; then
        step tests 150 "$python" -m pytest -p no:cacheprovider -m gpu -x -q tests/gpu
    fi
fi
step check 110 "$python" benchmarks/gpu_check.py --out "$out" --device "$device" --seconds 80
step kernels 110 "$python" benchmarks/gpu_kernels.py --out "$out" --device "$device" --seconds 80
step overlap 25 "$python" benchmarks/gpu_overlap.py --out "$out" --device "$device"
if [ "$device" = cuda ]; then
    step replay 110 "$python" benchmarks/gpu_replay.py --out "$out" --seconds 45 --cp-size "$ranks"
    step host 30 "$python" benchmarks/host_overhead.py --cp-size 16 --ranks 3
else
    small="--cp-size 8 --tokens-per-rank 512 --num-heads 2 --num-kv-heads 1"
    # shellcheck disable=SC2086
    step replay 110 "$python" benchmarks/gpu_replay.py --out "$out" --device cpu --seconds 20 $small
    step host 60 "$python" benchmarks/host_overhead.py --cp-size 8 --ranks 2 --repeats 3
fi
du -sh "$out" | cut -f1 | sed 's/^/size of all results: /'
exit $failed
