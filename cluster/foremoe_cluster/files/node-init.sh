#!/bin/bash
# First process of a node and PID 1 of its PID namespace: when it ends, by whatever means, so does
# everything on the node. Wants: NODE ADDRESS GATEWAY NODE_DIR NODE_LOGS BIN PAUSE_ARCHIVE PAUSE_IMAGE
# NODE_ROUTES ("subnet=gateway ..."), KUBELET_ARGS, DEVICE_PLUGIN (a command or nothing).
set -eu

mount --make-rshared /
hostname "$NODE"
for folder in /run/mount /run/containerd /run/netns /var/lib/cni; do mount -t tmpfs tmpfs "$folder"; done
for pair in kubelet=/var/lib/kubelet pods=/var/log/pods containers=/var/log/containers; do
  mount --bind "$NODE_DIR/${pair%%=*}" "${pair#*=}"
done

# kubelet sets these, and they belong to the whole machine. Here it finds them set already.
for pair in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
  kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
  copy="$NODE_DIR/sysctl/$(basename "${pair%%=*}")"
  echo "${pair#*=}" > "$copy"
  mount --bind "$copy" "/proc/sys/${pair%%=*}"
done

# The host plugs the cable in as soon as the network namespace is there.
for _ in $(seq 200); do ip link show eth0 > /dev/null 2>&1 && break; sleep 0.05; done
ip link set lo up
ip address add "$ADDRESS/24" dev eth0
ip link set eth0 up
ip route add default via "$GATEWAY"
for pair in $NODE_ROUTES; do ip route add "${pair%%=*}" via "${pair#*=}"; done
echo 1 > /proc/sys/net/ipv4/ip_forward
[ ! -e /proc/sys/net/bridge ] || echo 1 > /proc/sys/net/bridge/bridge-nf-call-iptables

# A program that ends is started again, as an init system would.
supervise() {
  local log="$NODE_LOGS/$1.log"
  shift
  while :; do "$@" >> "$log" 2>&1 || true; sleep 1; done &
}

export PATH="$BIN:$PATH"
socket="$NODE_DIR/run/containerd.sock"
supervise containerd containerd -c "$NODE_DIR/containerd.toml"
for _ in $(seq 300); do ctr -a "$socket" version > /dev/null 2>&1 && break; sleep 0.1; done
ctr -a "$socket" -n k8s.io images ls -q | grep -qx "$PAUSE_IMAGE" ||
  ctr -a "$socket" -n k8s.io images import "$PAUSE_ARCHIVE"
# shellcheck disable=SC2086  # word splitting is meant
supervise kubelet kubelet $KUBELET_ARGS
supervise kube-proxy kube-proxy --config="$NODE_DIR/kube-proxy.json" --v=2
# shellcheck disable=SC2086
[ -z "$DEVICE_PLUGIN" ] || supervise device-plugin $DEVICE_PLUGIN
while :; do sleep 3600 & wait $!; done
