# CRC-32C by the processor's instruction, three lanes at once, since a result takes three cycles.
#
# To join the lanes of a block, a checksum is advanced over `lane` zero bytes. That is linear: four tables of 256
# entries, built at import, suffice. Without the instruction `lanes_ready` is 0, and `batch_crc` calls
# `wire.checksums.crc32c`.

cdef extern from *:
    """
    #include <stddef.h>
    #include <stdint.h>
    #include <string.h>

    #if (defined(__GNUC__) || defined(__clang__)) && defined(__x86_64__)
      /* no builtins: compilers disagree on the feature that they need, and some always deny that the processor has it */
      #include <cpuid.h>
      static inline int klog_has_crc(void) {
          unsigned int a, b, c, d;
          return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_SSE4_2) != 0;
      }
      static inline uint64_t klog_crc_8(uint64_t crc, uint64_t word) {
          __asm__("crc32q %1, %0" : "+r"(crc) : "r"(word));
          return crc;
      }
      static inline uint32_t klog_crc_1(uint32_t crc, uint8_t byte) {
          __asm__("crc32b %1, %0" : "+r"(crc) : "r"(byte));
          return crc;
      }
      #define KLOG_HAS_CRC() klog_has_crc()
      #define KLOG_CRC_8(crc, word) klog_crc_8((crc), (word))
      #define KLOG_CRC_1(crc, byte) klog_crc_1((crc), (byte))
    #elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
      #include <arm_acle.h>
      #define KLOG_HAS_CRC() 1
      #define KLOG_CRC_8(crc, word) __crc32cd((uint32_t)(crc), (word))
      #define KLOG_CRC_1(crc, byte) __crc32cb((crc), (byte))
    #endif

    enum { KLOG_LONG = 4096, KLOG_SHORT = 256 };
    typedef uint32_t klog_shift[4][256];

    #ifdef KLOG_HAS_CRC
    static klog_shift klog_long_shift, klog_short_shift;

    static inline uint32_t klog_shifted(klog_shift table, uint64_t crc) {
        return table[0][crc & 255] ^ table[1][crc >> 8 & 255] ^ table[2][crc >> 16 & 255] ^ table[3][crc >> 24 & 255];
    }

    static void klog_make_shift(klog_shift table, size_t lane) {
        uint32_t bits[32];
        for (int bit = 0; bit < 32; bit++) {
            uint64_t crc = (uint64_t)1 << bit;
            for (size_t done = 0; done < lane; done += 8) crc = KLOG_CRC_8(crc, 0);
            bits[bit] = (uint32_t)crc;
        }
        for (int place = 0; place < 4; place++)
            for (int value = 0; value < 256; value++) {
                uint32_t crc = 0;
                for (int bit = 0; bit < 8; bit++)
                    if (value >> bit & 1) crc ^= bits[8 * place + bit];
                table[place][value] = crc;
            }
    }

    /* 64 bits, as the instruction returns them: truncating at each step would lengthen the dependency chain */
    static inline uint64_t klog_lanes(uint64_t crc, const uint8_t **at, const uint8_t *end, size_t lane,
                                      klog_shift shift) {
        const uint8_t *data = *at;
        while ((size_t)(end - data) >= 3 * lane) {
            uint64_t second = 0, third = 0;
            for (const uint8_t *stop = data + lane; data < stop; data += 8) {
                uint64_t a, b, c;
                memcpy(&a, data, 8);
                memcpy(&b, data + lane, 8);
                memcpy(&c, data + 2 * lane, 8);
                crc = KLOG_CRC_8(crc, a);
                second = KLOG_CRC_8(second, b);
                third = KLOG_CRC_8(third, c);
            }
            crc = klog_shifted(shift, klog_shifted(shift, crc) ^ second) ^ third;
            data += 2 * lane;
        }
        *at = data;
        return crc;
    }

    static uint32_t klog_crc32c(const uint8_t *data, size_t size) {
        const uint8_t *end = data + size;
        uint64_t crc = 0xFFFFFFFF;
        crc = klog_lanes(crc, &data, end, KLOG_LONG, klog_long_shift);
        crc = klog_lanes(crc, &data, end, KLOG_SHORT, klog_short_shift);
        for (; end - data >= 8; data += 8) {
            uint64_t word;
            memcpy(&word, data, 8);
            crc = KLOG_CRC_8(crc, word);
        }
        for (; data < end; data++) crc = KLOG_CRC_1((uint32_t)crc, *data);
        return ~(uint32_t)crc;
    }

    static int klog_make_lanes(void) {
        if (!KLOG_HAS_CRC()) return 0;
        klog_make_shift(klog_long_shift, KLOG_LONG);
        klog_make_shift(klog_short_shift, KLOG_SHORT);
        return 1;
    }
    #else
    static uint32_t klog_crc32c(const uint8_t *data, size_t size) { (void)data; (void)size; return 0; }
    static int klog_make_lanes(void) { return 0; }
    #endif
    """
    uint32_t klog_crc32c(const uint8_t *data, size_t size) nogil
    int klog_make_lanes()


cdef bint lanes_ready = klog_make_lanes()


cdef inline uint32_t batch_crc(const uint8_t *data, int64_t size, whole, int64_t position):
    """The CRC-32C of `size` bytes at `data`, the same as at `position` in `whole`."""
    if lanes_ready:
        return klog_crc32c(data, <size_t>size)
    return crc32c(whole[position:position + size])


cdef uint32_t[256] CRC32C_TABLE


cdef void fill_crc32c_table() noexcept:
    cdef uint32_t crc
    cdef int byte, i
    for byte in range(256):
        crc = byte
        for i in range(8):
            crc = (crc >> 1) ^ (0x82F63B78U if crc & 1 else 0)  # the polynomial, its bits reversed
        CRC32C_TABLE[byte] = crc


fill_crc32c_table()


cdef uint32_t crc32c_of(const uint8_t *data, int64_t size) noexcept nogil:
    """The CRC-32C without the GIL, byte by byte where the processor has no instruction for it."""
    cdef uint32_t crc = 0xFFFFFFFFU
    cdef int64_t i
    if lanes_ready:
        return klog_crc32c(data, <size_t>size)
    for i in range(size):
        crc = CRC32C_TABLE[(crc ^ data[i]) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFFU
