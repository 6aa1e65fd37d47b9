#!/usr/bin/env bash
# Four torchrun groups in network namespaces of this machine, joined by links of 100 Mbit/s: one is killed, one is slow,
# one comes late; then all are stopped, and go on. Needs root, iproute2 and torch. Prints what each terminal showed.
#
#   benchmarks/four_sites.sh FOLDER        (makes FOLDER/site0 ... and FOLDER/*.log; its namespaces are removed at the end)
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
file=$(cd "$(dirname "$0")/.." && pwd)/examples/sites_apart.yaml
NETGYM_SECRET=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
export NETGYM_SECRET OMP_NUM_THREADS=1
spaces="ngswitch ngmeet ng0 ng1 ng2 ng3"

clean() {
    for space in $spaces; do
        for pid in $(ip netns pids "$space" 2>/dev/null); do kill -9 "$pid" 2>/dev/null || true; done
        ip netns delete "$space" 2>/dev/null || true
    done
}
trap clean EXIT
clean
ip netns add ngswitch
ip -n ngswitch link add name bridge type bridge
ip -n ngswitch link set bridge up
number=1
for space in ngmeet ng0 ng1 ng2 ng3; do
    ip netns add "$space"
    ip -n "$space" link set lo up
    ip link add "v$space" netns ngswitch type veth peer name eth0 netns "$space"
    ip -n ngswitch link set "v$space" master bridge up
    ip -n "$space" address add "10.99.0.$number/24" dev eth0
    ip -n "$space" link set eth0 up
    tc -n "$space" qdisc add dev eth0 root tbf rate 100mbit burst 64kb latency 100ms 2>/dev/null || true
    number=$((number + 1))
done

site() { # NUMBER and what compare is given: one terminal of a site
    local number=$1
    shift
    NETGYM_RENDEZVOUS=10.99.0.1:29400 NETGYM_SITE=$number ip netns exec "ng$number" \
        python -m torch.distributed.run --nproc-per-node 1 --master-port 29500 -m exogym_core compare "$@" \
        >>"$folder/site$number.log" 2>&1 &
}
seen() { # FILE PATTERN: wait until it is there
    until grep -qE "$2" "$folder/$1" 2>/dev/null; do sleep 0.1; done
}
# Signals for the trainings themselves, not for torchrun's agents.
workers() { for pid in $(ip netns pids "ng$1"); do
    grep -qz compare "/proc/$pid/cmdline" && ! grep -qz torch.distributed.run "/proc/$pid/cmdline" && echo "$pid"
done; }

ip netns exec ngmeet python -m exogym_core rendezvous --sites 4 --listen 10.99.0.1:29400 >"$folder/rendezvous.log" 2>&1 &
seen rendezvous.log listening
for number in 0 1 2; do site $number "$file" --out "$folder/site$number"; done
seen rendezvous.log "the run begins"
seen site2.log "step [1-9]"
( # site 2 is slow: it stands still half of the time
    while pid=$(workers 2) && [ -n "$pid" ]; do
        kill -STOP $pid 2>/dev/null || true; sleep 0.3; kill -CONT $pid 2>/dev/null || true; sleep 0.3
    done
) &
site 3 "$file" --out "$folder/site3"
seen rendezvous.log "site 3 has come"
seen rendezvous.log "sites 0, 1, .*3"
for pid in $(ip netns pids ng1); do kill -9 "$pid" 2>/dev/null || true; done
seen rendezvous.log "without site.* 1"
site 1 --resume "$folder/site1"
seen rendezvous.log "site 1 has come[^~]*" && until [ "$(grep -c 'site 1 has come' "$folder/rendezvous.log")" -ge 2 ]; do sleep 0.1; done
sleep "${STOP_AFTER:-4}"
echo "--- all are stopped (Ctrl-C)" >>"$folder/rendezvous.log"
for number in 0 1 2 3; do for pid in $(workers $number); do kill -CONT "$pid"; kill -INT "$pid"; done; done
until [ -z "$(ip netns pids ng0; ip netns pids ng1; ip netns pids ng2; ip netns pids ng3)" ]; do sleep 0.2; done
for number in 0 1 2 3; do
    echo "--- started again" >>"$folder/site$number.log"
    site $number --resume "$folder/site$number"
done
until [ -z "$(ip netns pids ng0; ip netns pids ng1; ip netns pids ng2; ip netns pids ng3)" ]; do sleep 0.2; done
for name in rendezvous site0 site1 site2 site3; do printf '\n== %s\n' "$name"; cat "$folder/$name.log"; done
