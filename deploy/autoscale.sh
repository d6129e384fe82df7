#!/bin/sh
# Scales a NanoCP service by its queue: metrics in, `nanocp scale` out.
#
#   NANOCP_OPERATOR_KEY=KEY deploy/autoscale.sh [STATUS_HOST:PORT] [FEWEST] [MOST]
#
# One more instance if requests wait in three looks in a row, one fewer if none waits and fewer than
# half of the frames are taken in twenty. With KubeRay, run it beside the head with the workers'
# number fixed to MOST: the service keeps their places, and starts a process only in those it uses.
# A service with keys needs the one of an operator (service.operator_keys_file).
set -eu
target=${1:-127.0.0.1:9464} fewest=${2:-2} most=${3:-4}
busy=0 idle=0

say() { echo "autoscale.sh: $*" >&2; }

ask() {  # a path of the status port; the key does not show in `ps`
    printf 'header = "Authorization: Bearer %s"\n' "${NANOCP_OPERATOR_KEY:-none}" |
        curl -fsS --max-time 10 -K - "http://$target$1" ||
        { say "$target does not answer $1; a service with keys needs NANOCP_OPERATOR_KEY"; return 1; }
}

value() {  # of a metric, summed over its labels
    printf '%s\n' "$metrics" | awk -v name="nanocp:$1" '
        index($0, name) == 1 && /^[^ ]+ / { sum += $NF; found = 1 }
        END { if (!found) exit 1; printf "%d\n", sum * 100 }' || { say "$target has no nanocp:$1"; return 1; }
}

while sleep 5; do
    metrics=$(ask /metrics) || continue
    waiting=$(value num_requests_waiting) || continue
    taken=$(value kv_cache_usage_perc) || continue
    seats=$(ask /cluster/seats) || continue
    serving=$(printf '%s\n' "$seats" |
        sed 's/.*"serving": \[\([^]]*\)\].*/\1/' | tr ',' '\n' | grep -c .) || continue
    if [ "$waiting" -gt 0 ]; then busy=$((busy + 1)) idle=0; else busy=0 idle=$((idle + 1)); fi
    if [ "$taken" -gt $((50 * serving)) ]; then idle=0; fi
    if [ "$busy" -ge 3 ] && [ "$serving" -lt "$most" ]; then
        nanocp scale $((serving + 1)) --target "$target" || say "it stays at $serving instances"
        busy=0
    elif [ "$idle" -ge 20 ] && [ "$serving" -gt "$fewest" ]; then
        nanocp scale $((serving - 1)) --target "$target" || say "it stays at $serving instances"
        idle=0
    fi
done
