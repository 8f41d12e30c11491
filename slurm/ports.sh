# shellcheck shell=bash
# Ports of one job's Ray on one node.

PORTS=8 # of each job on a node
FIRST_PORT=20000

# The first of PORTS neighbouring ports on which no process listens here. The search starts at a port that follows from
# the job's id. Ray binds them seconds later, so they are below the ports that the kernel gives to outgoing connections.
first_of_free_ports() { # ADDRESS
    local ephemeral blocks attempt first port
    read -r ephemeral _ </proc/sys/net/ipv4/ip_local_port_range
    blocks=$(((ephemeral - FIRST_PORT) / PORTS))
    if ((blocks < 1)); then blocks=1000; fi # everything is ephemeral here
    for ((attempt = 0; attempt < blocks; attempt++)); do
        first=$((FIRST_PORT + (SLURM_JOB_ID + attempt) % blocks * PORTS))
        for ((port = first; port < first + PORTS; port++)); do
            if (exec 3<>"/dev/tcp/$1/$port" || exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then continue 2; fi
        done
        echo "$first"
        return
    done
    echo "no $PORTS free ports from $FIRST_PORT to $ephemeral on $(hostname)" >&2
    return 1
}
