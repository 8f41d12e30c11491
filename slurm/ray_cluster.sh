# shellcheck shell=bash
# Trains a recipe on all nodes of a Slurm allocation, on a Ray cluster that lives as long as the job. Sourced by
# grpo_70b.sh and train.sh; docs/slurm.md says how to use them.
#
#   run_recipe RECIPE [KEY=VALUE ...]
#
# The job's exit code: 0 done, 1 an unexpected error, 2 the recipe or what it names is wrong (nothing was started), 3 the
# run or the start of Ray failed, 4 a node was lost, 75 stopped by a signal with a checkpoint saved, 143 cancelled. After
# 4 and 75 the job goes back to the queue by itself if it may (--requeue, fewer restarts than MAX_RESTARTS), and the run
# continues.

CONTAINER=("${CONTAINER[@]}")                  # options of srun: --container-image=... --container-mounts=...
MAX_RESTARTS=${MAX_RESTARTS:-20}               # times that a job goes back to the queue
NODE_TMP=${NODE_TMP:-/tmp}                     # on each node's own disk, a short path: Ray's sockets and spilled objects
START_SECONDS=${START_SECONDS:-600}            # until Ray has every node
LOST_SECONDS=${LOST_SECONDS:-120}              # a run has to notice by itself that a node was lost
STOP_SECONDS=${STOP_SECONDS:-30}               # Ray has to stop and to leave its logs behind

run_recipe() {
    local recipe=$1 code
    shift
    mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    LOGS=$PWD/runs/slurm/${SLURM_JOB_ID}_${SLURM_RESTART_COUNT:-0}
    mkdir -p "$LOGS"
    say "job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}: $recipe on ${NODES[*]}; logs: $LOGS"
    # One task on one node, which may use all that the job has there. Not a function: $! has to be srun itself.
    STEP=(srun --overlap --nodes=1 --ntasks=1 --export=ALL --mpi=none --cpu-bind=none "${CONTAINER[@]}")
    STEPS=() DRIVER='' TOLD='' LOST=''
    trap 'finish $?' EXIT
    trap 'asked TERM' TERM
    trap 'asked USR1' USR1

    "${STEP[@]}" --nodelist="${NODES[0]}" megagrpo plan "$recipe" "$@" || finish $?
    start_ray
    # The program that trains is found by its process id: srun would hand its signal to all that it started, too.
    # shellcheck disable=SC2016
    "${STEP[@]}" --nodelist="${NODES[0]}" bash -c 'echo $$ >"$0"; exec "$@"' "$LOGS/driver.pid" \
        megagrpo "$(command_of "$recipe")" "$recipe" "$@" &
    DRIVER=$!
    await "$DRIVER" "$LOST_SECONDS" && code=0 || code=$?
    DRIVER=''
    say "the run ended with $code"
    if [[ $code == 138 ]]; then
        code=75 # ended by SIGUSR1 itself, before there was anything to save
    elif [[ -n $LOST && $code != 0 && $code != 75 ]]; then
        code=4
    fi
    finish "$code"
}

say() { echo "$(date +%T) slurm: $*"; }

command_of() { # RECIPE
    if grep -Eq '^kind: *sft\b' "$1"; then echo sft; else echo train; fi
}

# Slurm's address of a node, as a number: Ray takes no name, and changes 127.0.0.1.
address_of() { # NODE
    local name
    name=$(scontrol --oneliner show node "$1" | grep -oP ' NodeAddr=\K\S+')
    getent ahostsv4 "$name" | awk 'NR == 1 { print $1 }'
}

start_ray() {
    local index node code address addresses=()
    for node in "${NODES[@]}"; do
        address=$(address_of "$node") || {
            say "no address of node $node"
            finish 3
        }
        addresses+=("$address")
    done
    # shellcheck source=slurm/ports.sh
    source slurm/ports.sh
    RAY_PORT=$(first_of_free_ports "${addresses[0]}") || finish 3
    export RAY_PORT RAY_ADDRESS=${addresses[0]}:$RAY_PORT RAY_LOGS=$LOGS
    # Said outright: what Ray does by itself depends on files in the user's home. Who has no token stays out.
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$LOGS/token
    export RAY_worker_oom_score_adjustment=500 # reward workers have 1000: without memory, they end first
    (umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$RAY_AUTH_TOKEN_PATH")
    # Short, because sockets lie in it, and the job's own: another job may be on the same node.
    export RAY_TEMP=$NODE_TMP/ray_$SLURM_JOB_ID RAY_USAGE_STATS_ENABLED=0 PYTHONUNBUFFERED=1

    for index in "${!NODES[@]}"; do
        node=${NODES[index]}
        RAY_NODE_ADDRESS=${addresses[index]} "${STEP[@]}" --nodelist="$node" bash slurm/ray_node.sh \
            >"$LOGS/$node.log" 2>&1 &
        STEPS+=("$!")
    done
    "${STEP[@]}" --nodelist="${NODES[0]}" python slurm/wait_for_nodes.py "${#NODES[@]}" "$START_SECONDS" &
    await "$!" 0 && code=0 || code=$?
    if [[ $code != 0 ]]; then
        say "Ray did not start"
        if [[ -z $LOST ]]; then tail -n 10 "$LOGS"/*.log; fi
        finish 3
    fi
    touch "$LOGS/ready"
}

# The exit code of a step. If a node's Ray ends meanwhile, the step has GRACE seconds left.
await() { # PROCESS GRACE
    local index deadline=''
    LOST=''
    while kill -0 "$1" 2>/dev/null; do
        sleep 1 || true # a signal may end it
        for index in "${!STEPS[@]}"; do
            if [[ -z $LOST ]] && ! kill -0 "${STEPS[index]}" 2>/dev/null; then
                LOST=${NODES[index]}
                deadline=$((SECONDS + $2))
                say "Ray on node $LOST ended; the last lines of $LOGS/$LOST.log:"
                tail -n 20 "$LOGS/$LOST.log"
            fi
        done
        if [[ -n $LOST ]] && ((SECONDS >= deadline)); then
            kill -TERM "$1" 2>/dev/null || true
        fi
    done
    wait "$1"
}

# A signal: to be passed on while the run is going on. It saves a checkpoint and ends with 75.
asked() { # SIGNAL
    say "got SIG$1"
    if [[ $1 == TERM ]]; then
        TOLD=TERM
        if ! is_running; then # cancelled, or at its time limit: everything else got the signal, too
            trap - EXIT
            rm -f "$LOGS"/{token,driver.pid,ready}
            exit 143
        fi
    fi
    if [[ -n $DRIVER && -s $LOGS/driver.pid ]]; then
        kill -USR1 "$(<"$LOGS/driver.pid")" || true
    else
        finish 75 # nothing to save yet
    fi
}

# Whether Slurm still means the job to run.
is_running() { [[ "$(scontrol --oneliner show job "$SLURM_JOB_ID")" == *" JobState=RUNNING "* ]]; }

finish() { # EXIT_CODE
    local deadline=$((SECONDS + STOP_SECONDS))
    trap - EXIT
    trap '' TERM USR1
    say "taking Ray down"
    signal_steps USR1 || true
    while ((SECONDS < deadline)) && signal_steps 0; do sleep 0.2; done
    signal_steps TERM || true
    rm -f "$LOGS"/{token,driver.pid,ready}
    if [[ $1 == 75 || $1 == 4 ]] && may_requeue; then
        say "back to the queue ($1)"
        scontrol requeue "$SLURM_JOB_ID" || true # Slurm now ends what is left of this script
    fi
    say "exit code $1"
    exit "$1"
}

# Sends a signal to what is left of the steps; fails if nothing is.
signal_steps() { # SIGNAL
    local process code=1
    for process in $DRIVER "${STEPS[@]}"; do
        if kill "-$1" "$process" 2>/dev/null; then code=0; fi
    done
    return "$code"
}

may_requeue() {
    local job
    job=$(scontrol --oneliner show job "$SLURM_JOB_ID")
    # SIGTERM by hand means the end; Slurm sends it, too, when it takes the nodes for another job.
    [[ $TOLD != TERM || $job =~ \ PreemptTime=[0-9] ]] && [[ $job == *" JobState=RUNNING "* && $job == *" Requeue=1 "* ]] &&
        ((${SLURM_RESTART_COUNT:-0} < MAX_RESTARTS))
}
