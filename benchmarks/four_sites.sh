#!/usr/bin/env bash
# Four torchrun groups in network namespaces of this machine, joined by links of 100 Mbit/s: one is killed, one is slow,
# one comes late; then all are stopped, and go on. Needs root, iproute2 and torch. Prints what each terminal showed.
#
#   benchmarks/four_sites.sh FOLDER        (makes FOLDER/site0 ... and FOLDER/*.log; its namespaces are removed at the end)
set -u
folder=$(mkdir -p "$1" && cd "$1" && pwd)
file=$(cd "$(dirname "$0")/.." && pwd)/examples/sites_apart.yaml
NETGYM_SECRET=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
export NETGYM_SECRET OMP_NUM_THREADS=1
ng=ng$$ # of this run alone
spaces="${ng}s ${ng}m ${ng}0 ${ng}1 ${ng}2 ${ng}3"

clean() {
    for space in $spaces; do
        for pid in $(ip netns pids "$space" 2>/dev/null); do kill -9 "$pid" 2>/dev/null || true; done
        ip netns delete "$space" 2>/dev/null || true
    done
}
trap clean EXIT
ip netns add ${ng}s
ip -n ${ng}s link add name bridge type bridge
ip -n ${ng}s link set bridge up
number=1
for space in ${ng}m ${ng}0 ${ng}1 ${ng}2 ${ng}3; do
    ip netns add "$space"
    ip -n "$space" link set lo up
    ip link add "v$space" netns ${ng}s type veth peer name eth0 netns "$space"
    ip -n ${ng}s link set "v$space" master bridge up
    ip -n "$space" address add "10.99.0.$number/24" dev eth0
    ip -n "$space" link set eth0 up
    tc -n "$space" qdisc add dev eth0 root tbf rate 100mbit burst 64kb latency 100ms 2>/dev/null || true
    number=$((number + 1))
done

site() { # NUMBER and what compare is given: one terminal of a site
    local number=$1
    shift
    NETGYM_RENDEZVOUS=10.99.0.1:29400 NETGYM_SITE=$number ip netns exec "$ng$number" \
        python -m torch.distributed.run --nproc-per-node 1 --master-port 29500 --max-restarts 3 \
        -m exogym_core compare "$@" \
        >>"$folder/site$number.log" 2>&1 &
}
seen() { # FILE PATTERN: wait until it is there
    until grep -qE "$2" "$folder/$1" 2>/dev/null; do sleep 0.1; done
}
# Signals for the trainings themselves, not for torchrun's agents.
workers() {
    for pid in $(ip netns pids "$ng$1"); do
        command=$(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null)
        case $command in *torch.distributed.run*) ;; *exogym_core*compare*) echo "$pid" ;; esac
    done
}

ip netns exec ${ng}m python -m exogym_core rendezvous --sites 4 --wait 4s --listen 10.99.0.1:29400 >"$folder/rendezvous.log" 2>&1 &
seen rendezvous.log listening
for number in 0 1 2 3; do
    site $number "$file" --set steps="${STEPS:-4000}" --out "$folder/site$number"
done
seen site2.log "step [1-9]"
( # site 2 is slow: it stands still half of the time
    trap - EXIT
    while pid=$(workers 2) && [ -n "$pid" ] && [ ! -e "$folder/stopped" ]; do
        kill -STOP $pid; sleep 0.3; kill -CONT $pid; sleep 0.3
    done 2>/dev/null
) &
seen rendezvous.log "sites 0, 1, .*3"
for pid in $(workers 1); do kill -9 "$pid"; done # torchrun starts it again
until [ "$(grep -c 'site 1 has come' "$folder/rendezvous.log")" -ge 2 ]; do sleep 0.1; done
seen rendezvous.log "round [0-9]+: sites 0, 1, .*3"
sleep "${STOP_AFTER:-4}"
echo "--- all are stopped (Ctrl-C)" >>"$folder/rendezvous.log"
touch "$folder/stopped"
for number in 0 1 2 3; do # both, as a terminal does
    for pid in $(ip netns pids $ng$number); do kill -CONT "$pid"; kill -INT "$pid"; done
done
until [ -z "$(ip netns pids ${ng}0; ip netns pids ${ng}1; ip netns pids ${ng}2; ip netns pids ${ng}3)" ]; do sleep 0.2; done
for number in 0 1 2 3; do
    echo "--- started again" >>"$folder/site$number.log"
    site $number --resume "$folder/site$number"
done
until [ -z "$(ip netns pids ${ng}0; ip netns pids ${ng}1; ip netns pids ${ng}2; ip netns pids ${ng}3)" ]; do sleep 0.2; done
for name in rendezvous site0 site1 site2 site3; do printf '\n== %s\n' "$name"; cat "$folder/$name.log"; done
