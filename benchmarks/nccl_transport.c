/* nccl_transport: a rank of NCCL's collectives over sockets, without a GPU.
 *
 *   nccl_transport RANK RANKS ADDRESSES SOCKETS BARRIER_FILE WORK ...
 *
 * ADDRESSES are those of all ranks, with commas. WORK is OP:BYTES:CALLS, OP+OP:BYTES:CALLS or pause:MILLISECONDS:1; OP is
 * all_reduce, reduce, broadcast, or exchange of BYTES between each two ranks.
 *
 * It does to Linux's sockets what NCCL 2.8.4 does (src/transport/net_socket.cc, net.cc and src/collectives/device):
 * two channels around the ring of ranks; a connection has SOCKETS sockets and one that announces the size of each
 * slice; a slice is split over sockets in parts of at least 64 KiB, and its successor is begun when all parts are in
 * the sockets; eight steps of 512 KiB may be under way, in slices of two steps (all_reduce) or one (reduce to and
 * broadcast from rank 0); a channel's kernel takes its slices in order, and a call begins when both channels have
 * ended the one before. An exchange (grouped sends and receives) has a connection for each pair and direction, with
 * slices of 128 KiB and eight under way, all at once. Kernels and copies take no time. Rank 0 prints the seconds of each OP, from the arrival of
 * the last rank to the end of the last; ranks meet in the BARRIER_FILE, which is of the same machine and begins with
 * zeros.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { CHANNELS = 2, MOST_SOCKETS = 16, STEPS = 8, STEP = 512 << 10, LEAST_PART = 64 << 10, PORT = 5599, RING = 64,
       MOST_RANKS = 32, PAIR_SLICE = 128 << 10 };

struct part { int socket, size, done; };
struct connection {                     /* of one channel, in one direction */
    int sockets[MOST_SOCKETS + 1];      /* the last one announces sizes */
    int next, begun, num_parts;         /* socket of the next part; whether a slice is under way */
    struct part parts[MOST_SOCKETS];
    long posted, done, consumed;        /* slices: given by the kernel, sent or received, taken by the kernel */
    int sizes[RING];
};
struct slice { int receives, sends, size; };

static int rank, ranks, num_sockets, listener;
static char *addresses[MOST_RANKS];
static struct connection to[MOST_RANKS], from[MOST_RANKS];  /* of exchanges */
static struct connection out[CHANNELS], in[CHANNELS];
static struct slice *slices[CHANNELS];
static long num_slices[CHANNELS];
static char *buffer;
static volatile long *arrived;

static void die(const char *what) { perror(what); exit(1); }
static void rest(void) { usleep(150); }

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void barrier(void) {
    static long awaited;
    awaited += ranks;
    __sync_fetch_and_add(arrived, 1);
    while (*arrived < awaited) rest();
}

static int move(int sends, int socket, void *data, int size, int *done) {
    int moved = 0;
    while (*done < size) {
        ssize_t n = sends ? send(socket, (char *)data + *done, size - *done, MSG_DONTWAIT)
                          : recv(socket, (char *)data + *done, size - *done, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) break;
        if (n <= 0) die("socket");
        *done += n;
        moved = 1;
    }
    return moved;
}

/* Advance the oldest slice of a connection. */
static int progress(struct connection *c, int sends, int most) {
    int moved = 0, left = 0;
    if (!c->begun) {
        int size = c->sizes[c->done % RING], done = 0;
        if (sends ? c->done == c->posted : c->done - c->consumed >= most) return 0;
        move(sends, c->sockets[num_sockets], &size, sizeof size, &done);
        if (done == 0) return 0;
        int most_of_part = (size + num_sockets - 1) / num_sockets;
        if (most_of_part < LEAST_PART) most_of_part = LEAST_PART;
        c->num_parts = 0;
        for (int offset = 0; offset < size; offset += most_of_part) {
            int part = size - offset < most_of_part ? size - offset : most_of_part;
            c->parts[c->num_parts++] = (struct part){c->sockets[c->next], part, 0};
            c->next = (c->next + 1) % num_sockets;
        }
        c->begun = moved = 1;
    }
    for (int i = 0; i < c->num_parts; i++) {
        struct part *p = &c->parts[i];
        if (p->done < p->size) moved |= move(sends, p->socket, buffer, p->size, &p->done);
        left |= p->done < p->size;
    }
    if (!left) {
        c->begun = 0;
        c->done++;
        moved = 1;
    }
    return moved;
}

static void add(int channel, int receives, int sends, long size) {
    long n = num_slices[channel]++;
    slices[channel] = realloc(slices[channel], (n + 1) * sizeof(struct slice));
    slices[channel][n] = (struct slice){receives, sends, size};
}

static void plan(const char *op, long bytes) {
    int ring = !strcmp(op, "all_reduce"), up = !strcmp(op, "reduce");
    long chunk = ring ? 4 * STEP : STEP, loop = (ring ? ranks : 1) * CHANNELS * chunk;
    for (int channel = 0; channel < CHANNELS; channel++) {
        num_slices[channel] = 0;
        for (long at = 0; at < bytes; at += loop) {
            long share = (bytes - at) / ((ring ? ranks : 1) * CHANNELS);
            long size = share < chunk ? share : chunk, half = (size + 1) / 2;
            for (int round = 0; ring && round < 2 * ranks - 1; round++) {
                add(channel, round > 0, round < 2 * ranks - 2, half);
                add(channel, round > 0, round < 2 * ranks - 2, size - half);
            }
            if (!ring) add(channel, rank != (up ? 1 : 0), rank != (up ? 0 : ranks - 1), size);
        }
    }
}

static void call(int most) {
    long at[CHANNELS] = {0};
    for (int left = 1; left;) {
        int moved = left = 0;
        for (int c = 0; c < CHANNELS; c++) {
            for (; at[c] < num_slices[c]; at[c]++, moved = 1) {
                struct slice *s = &slices[c][at[c]];
                if (s->receives && in[c].done <= in[c].consumed) break;
                if (s->sends && out[c].posted - out[c].done >= most) break;
                in[c].consumed += s->receives;
                if (s->sends) out[c].sizes[out[c].posted++ % RING] = s->size;
            }
            left |= at[c] < num_slices[c];
            moved |= progress(&in[c], 0, most) | progress(&out[c], 1, most);
        }
        if (!moved && left) rest();
    }
}

static int new_socket(void) {
    int s = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return s;
}

/* Open the sockets of `num` connections to a rank, accept as many from another. */
static void join(int target, struct connection *out, struct connection *in, int num) {
    struct sockaddr_in there = {.sin_family = AF_INET, .sin_port = htons(PORT)};
    int one = 1, id, each = num_sockets + 1;
    inet_aton(addresses[target], &there.sin_addr);
    for (id = 0; id < num * each; id++) {
        int s = out[id / each].sockets[id % each] = new_socket();
        if (connect(s, (void *)&there, sizeof there)) die("connect");
        if (send(s, &id, sizeof id, 0) != sizeof id) die("send");
    }
    for (int n = 0; n < num * each; n++) {
        int s = accept(listener, 0, 0);
        if (s < 0 || recv(s, &id, sizeof id, MSG_WAITALL) != sizeof id) die("accept");
        setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        in[id / each].sockets[id % each] = s;
    }
    barrier();
}

static void exchange(long bytes) {
    long num = (bytes + PAIR_SLICE - 1) / PAIR_SLICE, last_out[MOST_RANKS], last_in[MOST_RANKS];
    for (int peer = 0; peer < ranks; peer++) {
        if (peer != rank && !to[(rank + 1) % ranks].sockets[0])
            for (int d = 1; d < ranks; d++) join((rank + d) % ranks, &to[(rank + d) % ranks], &from[(rank + ranks - d) % ranks], 1);
        last_out[peer] = to[peer].posted + num, last_in[peer] = from[peer].consumed + num;
    }
    for (int left = 1; left;) {
        int moved = left = 0;
        for (int peer = 0; peer < ranks; peer++) {
            struct connection *o = &to[peer], *i = &from[peer];
            if (peer == rank) continue;
            while (o->posted < last_out[peer] && o->posted - o->done < STEPS) o->sizes[o->posted++ % RING] = PAIR_SLICE;
            i->consumed = i->done;
            left |= o->posted < last_out[peer] || i->done < last_in[peer];
            if (i->done < last_in[peer]) moved |= progress(i, 0, STEPS);
            moved |= progress(o, 1, STEPS);
        }
        if (!moved && left) rest();
    }
}

int main(int argc, char **argv) {
    rank = atoi(argv[1]), ranks = atoi(argv[2]), num_sockets = atoi(argv[4]);
    arrived = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, open(argv[5], O_RDWR), 0);
    if (arrived == MAP_FAILED) die(argv[5]);
    buffer = malloc(4 * STEP);
    for (int i = 0; i < ranks; i++) addresses[i] = strtok(i ? 0 : argv[3], ",");
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_port = htons(PORT)};
    listener = new_socket();
    if (bind(listener, (void *)&here, sizeof here) || listen(listener, 1024)) die("listen");
    barrier();
    join((rank + 1) % ranks, out, in, CHANNELS);
    for (int i = 6; i < argc; i++) {
        char ops[64];
        long bytes;
        int calls;
        sscanf(argv[i], "%63[^:]:%ld:%d", ops, &bytes, &calls);
        barrier();
        if (!strcmp(ops, "pause")) {
            usleep(bytes * 1000);
            continue;
        }
        double began = now();
        for (char *op = strtok(ops, "+"); op; op = strtok(0, "+")) {
            int most = STEPS / (strcmp(op, "all_reduce") ? 1 : 2), is_exchange = !strcmp(op, "exchange");
            if (!is_exchange) plan(op, bytes);
            for (int n = 0; n < calls; n++) is_exchange ? exchange(bytes) : call(most);
        }
        for (int c = 0; c < CHANNELS; c++)
            while (out[c].done < out[c].posted)
                if (!progress(&out[c], 1, STEPS)) rest();
        for (int peer = 0; peer < ranks; peer++)
            while (to[peer].done < to[peer].posted)
                if (!progress(&to[peer], 1, STEPS)) rest();
        barrier();
        if (rank == 0) printf("%.4f\n", now() - began);
    }
    return 0;
}
