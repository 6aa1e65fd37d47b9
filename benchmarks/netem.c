/* netem: hosts around a switch, each with `tc qdisc add dev IF root netem delay D rate R limit N` at its exit, for
 * kernels without netem.
 *
 *   netem PREFIX HOSTS DELAY_US BITS_PER_SECOND MTU LIMIT LOSS
 *
 * Network namespace PREFIX0, PREFIX1, ... gets a tun device with the address 10.9.0.1, 10.9.0.2, ... A packet leaves it
 * when netem would let it go (net/sched/sch_netem.c): its delay after it came, but not before the last one that still
 * waits, and its own bytes later. As with netem the kernel takes it off the socket's account at once, so a queue grows
 * as long as windows do, and packets of up to 64 kB stay in one piece (segmentation offload). LIMIT is of packets; LOSS
 * is the share of them that is dropped at random. On SIGTERM it prints for each host bytes sent and the longest queue,
 * then the longest lateness and the number of dropped packets.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <linux/ip.h>
#include <linux/virtio_net.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { MOST_HOSTS = 32, ETHERNET = 14, MOST_PACKET = 70000, AT_ONCE = 64 };

struct packet { struct packet *next; int64_t leaves; int size, wire, target; char data[]; };
struct host { int tun; struct packet *first, *last; long num_waiting; int64_t waiting, longest, sent; };

static struct host hosts[MOST_HOSTS];
static volatile int is_over;

static void end(int signal) { is_over = signal; }
static void die(const char *what) { perror(what); exit(1); }

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int open_tun(const char *prefix, int number, int mtu) {
    char text[300];
    snprintf(text, sizeof text, "/var/run/netns/%s%d", prefix, number);
    int space = open(text, O_RDONLY);
    if (space < 0 || setns(space, CLONE_NEWNET)) die(text);
    close(space);
    struct ifreq request = {.ifr_name = "tun0", .ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
    int tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    if (tun < 0 || ioctl(tun, TUNSETIFF, &request) || ioctl(tun, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)) die("tun");
    snprintf(text, sizeof text, "ip addr add 10.9.0.%d/24 dev tun0; ip link set tun0 mtu %d txqueuelen 20000 up",
             number + 1, mtu);
    if (system(text)) exit(1);
    return tun;
}

/* Bytes on the wire: each segment of a large packet has headers of its own. */
static int wire_bytes(const struct virtio_net_hdr *header, int size) {
    if (!(header->gso_type & VIRTIO_NET_HDR_GSO_TCPV4)) return size + ETHERNET;
    int segments = (size - header->hdr_len + header->gso_size - 1) / header->gso_size;
    return size + ETHERNET + (segments - 1) * (header->hdr_len + ETHERNET);
}

int main(int argc, char **argv) {
    if (argc != 8) return fprintf(stderr, "usage: see the head of netem.c\n"), 2;
    int num = atoi(argv[2]);
    int64_t delay = atol(argv[3]) * 1000, late = 0;
    double byte_nanoseconds = 8e9 / atof(argv[4]), loss = atof(argv[7]);
    long limit = atol(argv[6]), dropped = 0;
    signal(SIGTERM, end);
    int poll = epoll_create1(0), timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    for (int i = 0; i < num; i++) {
        struct epoll_event event = {.events = EPOLLIN};
        hosts[i].tun = open_tun(argv[1], i, atoi(argv[5]));
        epoll_ctl(poll, EPOLL_CTL_ADD, hosts[i].tun, &event);
    }
    struct epoll_event event = {.events = EPOLLIN};
    epoll_ctl(poll, EPOLL_CTL_ADD, timer, &event);
    sched_setscheduler(0, SCHED_RR, &(struct sched_param){.sched_priority = 20});
    puts("ready");
    fflush(stdout);
    static char data[MOST_PACKET];
    while (!is_over) {
        int64_t wakes = now() + 1000000000;
        for (int i = 0; i < num; i++) {
            struct host *host = &hosts[i];
            for (int n = 0; n < AT_ONCE; n++) {
                int size = read(host->tun, data, sizeof data);
                if (size <= 0) break;
                struct virtio_net_hdr *header = (void *)data;
                struct iphdr *ip = (void *)(header + 1);
                int target = (ntohl(ip->daddr) & 255) - 1;
                if (ip->version != 4 || target < 0 || target >= num) continue;
                if (host->num_waiting >= limit || (loss > 0 && drand48() < loss)) { dropped++; continue; }
                struct packet *packet = malloc(sizeof *packet + size);
                int64_t begins = now() + delay;
                if (host->first && host->last->leaves > begins) begins = host->last->leaves;
                int wire = wire_bytes(header, size - (int)sizeof *header);
                *packet = (struct packet){0, begins + (int64_t)(wire * byte_nanoseconds), size, wire, target};
                memcpy(packet->data, data, size);
                if (host->first) host->last->next = packet; else host->first = packet;
                host->last = packet;
                host->num_waiting++;
                host->sent += wire;
                host->waiting += wire;
                if (host->waiting > host->longest) host->longest = host->waiting;
            }
            int64_t present = now();
            for (struct packet *packet; (packet = host->first) && packet->leaves <= present;) {
                if (present - packet->leaves > late) late = present - packet->leaves;
                if (write(hosts[packet->target].tun, packet->data, packet->size) < 0) dropped++;
                host->first = packet->next;
                host->num_waiting--;
                host->waiting -= packet->wire;
                free(packet);
            }
            if (host->first && host->first->leaves < wakes) wakes = host->first->leaves;
        }
        struct itimerspec until = {{0, 0}, {wakes / 1000000000, wakes % 1000000000}};
        timerfd_settime(timer, TFD_TIMER_ABSTIME, &until, 0);
        epoll_wait(poll, &event, 1, 1000);
        uint64_t expired;
        (void)!read(timer, &expired, sizeof expired);
    }
    for (int i = 0; i < num; i++)
        fprintf(stderr, "host %d: %.0f MB, longest queue %.1f MB\n", i, hosts[i].sent / 1e6, hosts[i].longest / 1e6);
    fprintf(stderr, "%.1f ms late, %ld dropped\n", late / 1e6, dropped);
}
