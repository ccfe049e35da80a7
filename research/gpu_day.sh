#!/bin/bash
# Measure this project on one GPU. Needs no network. Every step has a time limit and needs no
# other step. OUT gets results.jsonl, log.txt and two timelines.
#
#   bash research/gpu_day.sh OUT                 steps 1 to 13, about 20 minutes on an H100
#   bash research/gpu_day.sh OUT before,law      steps by number or name, as in 1-4,parts
#   bash research/gpu_day.sh OUT --tiny          tiny models on any machine, to test this script
#
# What is next, if you have a card for 15 minutes: before,law (research/rules/card.md says what
# we conclude). In a copy without .git, first put the MoE of commit 81f0289 in place:
#   git show 81f0289:moe.py > moe_before.py
#
# PYTHON names the interpreter (default: python3). NANOGPT names a clone of nanoGPT, for step
# peers. --wheels DIR unpacks packages from DIR first, if any is missing. To fill DIR:
#   pip download -d DIR --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
#     --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 \
#     --platform manylinux_2_27_x86_64 --platform manylinux_2_28_x86_64 \
#     numpy tiktoken regex requests charset-normalizer idna urllib3 certifi tqdm safetensors \
#     matplotlib contourpy cycler fonttools kiwisolver packaging pillow pyparsing \
#     python-dateutil six pytest iniconfig pluggy pygments

STEPS="env:40 first_run:120 1B:200 1B-moe:200 loss:90 PowerLM-3B:200 PowerMoE-3B:200
profile:120 exact:150 parts:60 peers:200 two:120 tests:300 before:300 law:500"  # name:seconds
[[ $1 && $1 != -* ]] || { sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit 2; }
mkdir -p "$1" && OUT=$(realpath "$1") && shift && cd "$(dirname "$0")/.." || exit
PYTHON=${PYTHON:-python3} WANTED=1-13 TINY="" WORK=$(mktemp -d)
while [[ $1 ]]; do
    case $1 in
        --tiny) TINY=--tiny ;;
        --wheels) WHEELS=$(realpath "$2"); shift ;;
        *) WANTED=$1 ;;
    esac
    shift
done
MOE_BEFORE=$WORK/moe_before.py
if [[ -f moe_before.py ]]; then
    cp moe_before.py "$MOE_BEFORE"
else
    git show 81f0289:moe.py > "$MOE_BEFORE" 2> /dev/null
fi
export OUT TINY PYTHON MOE_BEFORE PYTHONUNBUFFERED=1

needed='import matplotlib, numpy, pytest, safetensors, tiktoken, torch, tqdm'
if ! "$PYTHON" -c "$needed" && [[ $WHEELS ]]; then
    "$PYTHON" -m pip install -q --no-index --no-deps --target "$WORK/site" "$WHEELS"/*.whl
    export PYTHONPATH=$WORK/site
fi

measure() {
    "$PYTHON" research/gpu.py "$1" "$OUT" $TINY
}

two() {  # two processes on one card, where NCCL should refuse and gloo should train
    export WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29411
    for backend in nccl gloo; do
        RANK=1 timeout 55 "$PYTHON" research/gpu.py $backend "$OUT" $TINY &
        RANK=0 timeout 55 "$PYTHON" research/gpu.py $backend "$OUT" $TINY
        wait
    done
}

step() {
    case $1 in
        two) two ;;
        exact) CUBLAS_WORKSPACE_CONFIG=:4096:8 measure exact ;;
        tests) # in several processes, if pytest-xdist is there
            "$PYTHON" -c 'import xdist' && parallel=(-n 8 --dist worksteal)
            "$PYTHON" -m pytest -q "${parallel[@]}" ${TINY:+tests/test_moe.py} ;;
        law) "$PYTHON" research/card_law.py "$OUT/law" --seconds 440 $TINY ;;
        *) measure "$1" ;;
    esac
}
export -f step two measure

number=0
for entry in $STEPS; do
    name=${entry%:*} number=$((number + 1)) began=$SECONDS chosen=""
    for part in ${WANTED//,/ }; do
        [[ $part = "$name" || $part = "$number" ]] && chosen=1
        [[ $part =~ ^([0-9]+)-([0-9]+)$ ]] &&
            ((BASH_REMATCH[1] <= number && number <= BASH_REMATCH[2])) && chosen=1
    done
    [[ $chosen ]] || continue
    limit=$((${entry#*:} * (${#TINY} ? 4 : 1)))
    timeout -k 5 $limit bash -c 'step "$1"' _ "$name" >> "$OUT/log.txt" 2>&1
    echo "{\"step\": \"$name\", \"status\": $?, \"seconds\": $((SECONDS - began))}" |
        tee -a "$OUT/results.jsonl"
done
rm -rf "$WORK"
