/* nccl_transport: a rank of NCCL's collectives over sockets, without a GPU.
 *
 *   nccl_transport RANK RANKS NEXT_ADDRESS SOCKETS BARRIER_FILE OP:BYTES:CALLS ...
 *
 * It does to Linux's sockets what NCCL 2.8.4 does (src/transport/net_socket.cc, net.cc and src/collectives/device):
 * two channels around the ring of ranks; a connection has SOCKETS sockets and one that announces the size of each
 * slice; a slice is split over sockets in parts of at least 64 KiB, and its successor is begun when all parts are in
 * the sockets; eight steps of 512 KiB may be under way, in slices of two steps (all_reduce) or one (reduce to and
 * broadcast from rank 0); a channel's kernel takes its slices in order, and a call begins when both channels have
 * ended the one before. Kernels and copies take no time. Rank 0 prints the seconds of each OP, from the arrival of
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

enum { CHANNELS = 2, MOST_SOCKETS = 16, STEPS = 8, STEP = 512 << 10, LEAST_PART = 64 << 10, PORT = 5599, RING = 64 };

struct part { int socket, size, done; };
struct connection {                     /* of one channel, in one direction */
    int sockets[MOST_SOCKETS + 1];      /* the last one announces sizes */
    int next, begun, num_parts;         /* socket of the next part; whether a slice is under way */
    struct part parts[MOST_SOCKETS];
    long posted, done, consumed;        /* slices: given by the kernel, sent or received, taken by the kernel */
    int sizes[RING];
};
struct slice { int receives, sends, size; };

static int rank, ranks, num_sockets;
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

static void join_ring(const char *next) {
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_port = htons(PORT)}, there = here;
    int listener = new_socket(), one = 1, id;
    inet_aton(next, &there.sin_addr);
    if (bind(listener, (void *)&here, sizeof here) || listen(listener, 128)) die("listen");
    barrier();
    for (id = 0; id < CHANNELS * (num_sockets + 1); id++) {
        int s = out[id / (num_sockets + 1)].sockets[id % (num_sockets + 1)] = new_socket();
        if (connect(s, (void *)&there, sizeof there)) die("connect");
        if (send(s, &id, sizeof id, 0) != sizeof id) die("send");
    }
    for (int n = 0; n < CHANNELS * (num_sockets + 1); n++) {
        int s = accept(listener, 0, 0);
        if (s < 0 || recv(s, &id, sizeof id, MSG_WAITALL) != sizeof id) die("accept");
        setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        in[id / (num_sockets + 1)].sockets[id % (num_sockets + 1)] = s;
    }
}

int main(int argc, char **argv) {
    rank = atoi(argv[1]), ranks = atoi(argv[2]), num_sockets = atoi(argv[4]);
    arrived = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, open(argv[5], O_RDWR), 0);
    if (arrived == MAP_FAILED) die(argv[5]);
    buffer = malloc(4 * STEP);
    join_ring(argv[3]);
    for (int i = 6; i < argc; i++) {
        char op[32];
        long bytes;
        int calls;
        sscanf(argv[i], "%31[^:]:%ld:%d", op, &bytes, &calls);
        int most = STEPS / (strcmp(op, "all_reduce") ? 1 : 2);
        barrier();
        double began = now();
        plan(op, bytes);
        for (int n = 0; n < calls; n++) call(most);
        for (int c = 0; c < CHANNELS; c++)
            while (out[c].done < out[c].posted)
                if (!progress(&out[c], 1, most)) rest();
        barrier();
        if (rank == 0) printf("%.4f\n", now() - began);
    }
    return 0;
}
