/* Walk the records of uncompressed batches (magic 2) and copy what a reader wants of them: the same columns as ours, keys
 * and values with their ends, offsets, timestamps and their type. No checksum, no check of any length, no nulls: what a
 * loop over these bytes costs at least.
 *
 *     walk FILE SECONDS    prints the records in the file, and million records a second
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ROWS 65536 /* of the columns, which are filled again and again, as where their reader is done with them */

static int32_t ends[ROWS + 1], key_ends[ROWS + 1], types[ROWS];
static int64_t offsets[ROWS], timestamps[ROWS];

static int64_t big(const uint8_t *at, int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++) value = value << 8 | at[i];
    return (int64_t)value;
}

static const uint8_t *varint(const uint8_t *at, int64_t *value) {
    uint64_t number = *at & 0x7F;
    for (int shift = 7; *at++ & 0x80; shift += 7) number |= (uint64_t)(*at & 0x7F) << shift;
    *value = (int64_t)(number >> 1) ^ -(int64_t)(number & 1);
    return at;
}

static int64_t walk(const uint8_t *at, const uint8_t *stop, uint8_t *keys, uint8_t *values) {
    int64_t total = 0, row = 0, size, time, offset, headers;
    while (at < stop) {
        const uint8_t *end = at + 12 + big(at + 8, 4);
        int64_t base_offset = big(at, 8), base_time = big(at + 27, 8);
        int32_t type = at[22] >> 3 & 1;
        for (at += 61; at < end; row++, total++) {
            if (row == ROWS) row = 0;
            at = varint(at, &size);
            at = varint(at + 1, &time);
            at = varint(at, &offset);
            at = varint(at, &size);
            int32_t start = row ? key_ends[row] : 0;
            if (size > 0) {
                memcpy(keys + start, at, size);
                at += size;
            }
            key_ends[row + 1] = start + (int32_t)(size > 0 ? size : 0);
            at = varint(at, &size);
            start = row ? ends[row] : 0;
            if (size > 0) {
                memcpy(values + start, at, size);
                at += size;
            }
            ends[row + 1] = start + (int32_t)(size > 0 ? size : 0);
            offsets[row] = base_offset + offset;
            timestamps[row] = base_time + time;
            types[row] = type;
            at = varint(at, &headers); /* the benchmark's records have none */
        }
    }
    return total;
}

int main(int count, char **arguments) {
    FILE *file = count == 3 ? fopen(arguments[1], "rb") : NULL;
    if (!file || fseek(file, 0, SEEK_END)) return 1;
    long size = ftell(file);
    rewind(file);
    uint8_t *data = malloc(size), *keys = malloc(size), *values = malloc(size);
    if (!data || !keys || !values || fread(data, 1, size, file) != (size_t)size) return 1;
    struct timespec start, now;
    double seconds = 0, wanted = atof(arguments[2]);
    int64_t once = walk(data, data + size, keys, values), total = 0; /* warm */
    clock_gettime(CLOCK_MONOTONIC, &start);
    while (seconds < wanted) {
        total += walk(data, data + size, keys, values);
        clock_gettime(CLOCK_MONOTONIC, &now);
        seconds = now.tv_sec - start.tv_sec + (now.tv_nsec - start.tv_nsec) / 1e9;
    }
    printf("%lld %f\n", (long long)once, total / seconds / 1e6);
    return 0;
}
