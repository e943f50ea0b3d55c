/* Load of many connections, each of which sends its next request when the one before is answered. One thread, epoll.
 *
 *     connections PORT CONNECTIONS SECONDS FILE
 *
 * FILE holds whole request frames (Produce, version 3 to 8, of one partition each), one after the other; the connections
 * take them in turn. Prints requests answered and seconds; ends with 1 where an answer holds an error.
 */
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>

#define MOST 4096   /* connections */
#define ANSWER 512  /* bytes of a response */
#define TIMEOUT 30000 /* ms without any answer */

static struct connection {
    int socket;
    const uint8_t *frame;
    size_t size, filled;
    uint8_t answer[ANSWER];
} connections[MOST];

static uint32_t big(const uint8_t *at, int bytes) {
    uint32_t value = 0;
    for (int i = 0; i < bytes; i++) value = value << 8 | at[i];
    return value;
}

static int fail(const char *what) {
    perror(what);
    return 1;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

/* The socket's buffer is empty, since the request before is answered: a small frame fits, and this does not block. */
static int send_frame(struct connection *one) {
    for (size_t sent = 0; sent < one->size;) {
        ssize_t count = send(one->socket, one->frame + sent, one->size - sent, MSG_NOSIGNAL);
        if (count < 0) return 0;
        sent += count;
    }
    return 1;
}

/* 1 where a whole answer without error is there, 0 where it is not whole, -1 for an error. */
static int receive(struct connection *one) {
    ssize_t count = recv(one->socket, one->answer + one->filled, ANSWER - one->filled, MSG_DONTWAIT);
    if (count <= 0) return -1;
    one->filled += count;
    if (one->filled < 4) return 0;
    size_t size = 4 + big(one->answer, 4);
    if (size > ANSWER || one->filled > size) return -1;
    if (one->filled < size) return 0;
    one->filled = 0;
    /* size, correlation id, topics, the topic's name, partitions, the partition's number */
    size_t error = 4 + 4 + 4 + 2 + big(one->answer + 12, 2) + 4 + 4;
    if (error + 2 > size || big(one->answer + error, 2)) {
        fprintf(stderr, "error code %u\n", error + 2 > size ? 0 : big(one->answer + error, 2));
        return -1;
    }
    return 1;
}

int main(int count, char **arguments) {
    static uint8_t frames[1 << 20];
    static struct epoll_event events[MOST];
    FILE *file = count == 5 ? fopen(arguments[4], "rb") : NULL;
    int total = count == 5 ? atoi(arguments[2]) : 0;
    if (!file || total < 1 || total > MOST) return fail("usage");
    size_t size = fread(frames, 1, sizeof frames, file), at = 0;
    double seconds = atof(arguments[3]);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(arguments[1]))};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int poll = epoll_create1(0), on = 1;
    for (int i = 0; i < total; i++) {
        struct connection *one = &connections[i];
        one->socket = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(one->socket, (struct sockaddr *)&address, sizeof address)) return fail("connect");
        setsockopt(one->socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        if (at + 4 > size) at = 0;
        one->frame = frames + at;
        one->size = 4 + big(one->frame, 4);
        if (at + one->size > size) return fail("frames");
        at += one->size;
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = one};
        if (epoll_ctl(poll, EPOLL_CTL_ADD, one->socket, &event)) return fail("epoll_ctl");
    }
    double started = now(), elapsed = 0;
    for (int i = 0; i < total; i++)
        if (!send_frame(&connections[i])) return fail("send");
    long answered = 0;
    while ((elapsed = now() - started) < seconds) {
        int ready = epoll_wait(poll, events, MOST, TIMEOUT);
        if (ready < 1) return fail("no answer");
        for (int i = 0; i < ready; i++) {
            int got = receive(events[i].data.ptr);
            if (got < 0) return fail("receive");
            if (!got) continue;
            answered++;
            if (!send_frame(events[i].data.ptr)) return fail("send");
        }
    }
    printf("%ld %f\n", answered, elapsed);
    return 0;
}
