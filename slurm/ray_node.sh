#!/usr/bin/env bash
# Ray on one node of a job: the head on the node of RAY_ADDRESS, a worker elsewhere. Ends when Ray does, on SIGUSR1, or on
# the SIGTERM of a cancelled job, and leaves Ray's logs in RAY_LOGS and nothing on the node; unless Slurm kills a cancelled
# job first (KillWait), whose files in RAY_TEMP then stay. Started by ray_cluster.sh, whose variables it reads.
set -euo pipefail
# shellcheck source=slurm/ports.sh
source slurm/ports.sh

ports=$(first_of_free_ports "$RAY_NODE_ADDRESS")
options=(
    --node-ip-address="$RAY_NODE_ADDRESS" --num-cpus="${SLURM_CPUS_ON_NODE:-$(nproc)}" --block --disable-usage-stats
    --dashboard-agent-listen-port="$((ports + 1))" --dashboard-agent-grpc-port="$((ports + 2))"
    --runtime-env-agent-port="$((ports + 3))" --metrics-export-port="$((ports + 4))"
    --min-worker-port=0 --max-worker-port=0 # what binds its own port needs no range, which another job may use, too
)
if [[ $RAY_ADDRESS == "$RAY_NODE_ADDRESS:$RAY_PORT" ]]; then
    options+=(--head --port="$RAY_PORT" --temp-dir="$RAY_TEMP" --include-dashboard=false)
    # Without this package Ray serves no clients, and refuses to be told where; with it, every head would want one port.
    if python -c 'import grpc' 2>/dev/null; then options+=(--ray-client-server-port="$((ports + 5))"); fi
else
    options+=(--address="$RAY_ADDRESS")
    until (exec 3<>"/dev/tcp/${RAY_ADDRESS/:/\/}") 2>/dev/null; do sleep 0.5; done # whoever waits has a deadline
fi

ulimit -n "$(ulimit -Hn)"
node=$SLURMD_NODENAME
unset "${!SLURM_@}" "${!PMI@}" # what Ray starts is no task of Slurm's

stop() {
    trap '' USR1 TERM
    kill -KILL $(jobs -p) 2>/dev/null || true # Ray, perhaps just started
    if [[ -d $RAY_TEMP ]]; then
        mkdir -p "$RAY_LOGS/$node"
        cp -r "$RAY_TEMP"/session_2*/logs/. "$RAY_LOGS/$node" || true
        rm -rf "$RAY_TEMP"
    fi
}
trap 'stop; exit 0' USR1
trap 'stop; exit 143' TERM
echo "ray start ${options[*]}"
# Ray gives up on agents that take more than seconds to start, as they do where all nodes read one file system at once.
for attempt in 1 2 3 4 5; do
    ray start "${options[@]}" &
    ray=$!
    wait "$ray" && code=0 || code=$?
    echo "Ray ended with $code"
    if [[ -e $RAY_LOGS/ready ]]; then break; fi
    echo "attempt $attempt failed"
    sleep "$attempt" || true
done
stop
exit 1
