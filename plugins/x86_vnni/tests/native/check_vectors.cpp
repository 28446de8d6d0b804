// Checks one tier bit for bit against vectors of the reference, through the C interface, without Python:
//
//   check_vectors VECTORS.bin TIER [NAME-PART]
//
// Prints a line per case and exits 0 only if every case has the reference's bits (any NaN equals any NaN), with
// ordinary scratch memory, with little, and with so little that every token is a chunk of its own, and if unpacking
// gives the canonical weights back. Link it with the objects of a plugin; static linking makes it fit for an emulator.
// Nothing here knows an instruction set. The file is little-endian (write_vectors.py); values are swapped as read.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <int8moe/abi.h>

namespace {

constexpr uint32_t kMagic = 0x564D3849;  // "I8MV"
constexpr uint32_t kFormat = 1;
// Ordinary; so few bytes that the larger cases need some chunks; a chunk for each token.
constexpr int64_t kScratchLimits[] = {0, 60000, 1};

FILE* file;

[[noreturn]] void stop(const char* why) {
  fprintf(stderr, "check_vectors: %s\n", why);
  exit(2);
}

bool big_endian() {
  const uint16_t one = 1;
  uint8_t first;
  memcpy(&first, &one, 1);
  return first == 0;
}

void read_items(void* out, size_t size, size_t count) {
  if (count != 0 && fread(out, size, count, file) != count) stop("the vector file ends early");
  if (!big_endian() || size == 1) return;
  uint8_t* bytes = static_cast<uint8_t*>(out);
  for (size_t i = 0; i < count; ++i, bytes += size)
    for (size_t b = 0; b < size / 2; ++b) {
      const uint8_t swap = bytes[b];
      bytes[b] = bytes[size - 1 - b];
      bytes[size - 1 - b] = swap;
    }
}

template <class T>
T read_one() {
  T value;
  read_items(&value, sizeof value, 1);
  return value;
}

struct Array {
  void* data;  // null when the case has none
  int64_t count;
  int64_t size;
};

void* allocate(int64_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, static_cast<size_t>(bytes + 64)) != 0) stop("out of memory");
  return memory;
}

Array read_array() {
  Array a = {};
  a.size = read_one<int64_t>();
  a.count = read_one<int64_t>();
  if (a.size == 0) return a;
  a.data = allocate(a.size * a.count);
  read_items(a.data, static_cast<size_t>(a.size), static_cast<size_t>(a.count));
  return a;
}

template <class T>
const T* as(const Array& a) {
  return static_cast<const T*>(a.data);
}

// Canonical weights in storage of the packed size; packed when it returns.
struct Packed {
  uint8_t* storage;
  int64_t stride;
  int64_t canonical_bytes;
  int8moe_pack_call call;
  const Array* weights;

  bool pack(const Array& source, int64_t experts, int64_t halves, int64_t rows, int64_t depth) {
    weights = &source;
    canonical_bytes = halves * rows * depth;
    const int64_t packed_bytes = int8moe_packed_bytes(halves, rows, depth);
    stride = packed_bytes > canonical_bytes ? packed_bytes : canonical_bytes;
    storage = static_cast<uint8_t*>(allocate(stride * experts));
    memset(storage, 0xAB, static_cast<size_t>(stride * experts));
    for (int64_t e = 0; e < experts; ++e)
      memcpy(storage + e * stride, as<uint8_t>(source) + e * canonical_bytes, static_cast<size_t>(canonical_bytes));
    call = {sizeof call, 1, storage, stride, experts, halves, rows, depth};
    return int8moe_pack(&call) == INT8MOE_OK;
  }
  bool unpacks() {
    if (int8moe_unpack(&call) != INT8MOE_OK) return false;
    bool equal = true;
    for (int64_t e = 0; e < call.experts; ++e)
      equal = equal && memcmp(storage + e * stride, as<uint8_t>(*weights) + e * canonical_bytes,
                              static_cast<size_t>(canonical_bytes)) == 0;
    free(storage);
    return equal;
  }
};

uint32_t bits_at(const void* data, int64_t index, int64_t size) {
  if (size == 2) {
    uint16_t v;
    memcpy(&v, static_cast<const char*>(data) + index * 2, 2);
    return v;
  }
  uint32_t v;
  memcpy(&v, static_cast<const char*>(data) + index * 4, 4);
  return v;
}

bool is_nan(uint32_t bits, int dtype) {
  if (dtype == INT8MOE_BF16) return (bits & 0x7FFFu) > 0x7F80u;
  if (dtype == INT8MOE_F16) return (bits & 0x7FFFu) > 0x7C00u;
  return (bits & 0x7FFFFFFFu) > 0x7F800000u;
}

// Index of the first difference, or -1.
int64_t first_difference(const void* found, const Array& expected, int dtype) {
  for (int64_t i = 0; i < expected.count; ++i) {
    const uint32_t a = bits_at(found, i, expected.size), b = bits_at(expected.data, i, expected.size);
    if (a != b && !(is_nan(a, dtype) && is_nan(b, dtype))) return i;
  }
  return -1;
}

int64_t product_of_half(int64_t activation) { return activation < INT8MOE_SILU_NO_MUL ? 2 : 1; }

// True when the case has the reference's bits.
bool check_case(int32_t tier, const char* filter) {
  char name[256] = {};
  const uint32_t length = read_one<uint32_t>();
  if (length >= sizeof name) stop("a case's name is too long");
  read_items(name, 1, length);
  int64_t field[11];
  read_items(field, 8, 11);
  const int64_t by_rows = field[0], num_experts = field[1], local_experts = field[2], hidden = field[3],
                inner = field[4], activation = field[5], tokens = field[6], top_k = field[7], on_input = field[8];
  const int32_t x_dtype = static_cast<int32_t>(field[9]), index_dtype = static_cast<int32_t>(field[10]);
  const int32_t weights_dtype = static_cast<int32_t>(read_one<int64_t>());
  float swiglu[2];
  read_items(swiglu, 4, 2);
  // w13, its scale and bias, w2, its scale and bias, expert_map, x, router weights or row scales, ids or counts, out.
  Array a[11];
  for (Array& array : a) array = read_array();
  const Array& expected = a[10];

  bool good = true;
  if (filter == nullptr || strstr(name, filter) != nullptr) {
    Packed w13, w2;
    if (!w13.pack(a[0], local_experts, product_of_half(activation), inner, hidden) ||
        !w2.pack(a[3], local_experts, 1, hidden, inner))
      stop("packing failed");
    int8moe_layer layer = {};
    layer.struct_bytes = sizeof layer;
    layer.driver_version = INT8MOE_DRIVER_VERSION;
    layer.tier = tier;
    layer.activation = static_cast<int32_t>(activation);
    layer.num_experts = num_experts;
    layer.local_experts = local_experts;
    layer.hidden_size = hidden;
    layer.intermediate_size = inner;
    layer.w13 = w13.storage;
    layer.w13_stride = w13.stride;
    layer.w2 = w2.storage;
    layer.w2_stride = w2.stride;
    layer.w13_scale = as<float>(a[1]);
    layer.w13_bias = as<float>(a[2]);
    layer.w2_scale = as<float>(a[4]);
    layer.w2_bias = as<float>(a[5]);
    layer.expert_map = as<int32_t>(a[6]);
    layer.swiglu_alpha = swiglu[0];
    layer.swiglu_limit = swiglu[1];
    layer.router_weight_on_input = static_cast<int32_t>(on_input);

    void* out = allocate(expected.count * expected.size);
    for (const int64_t scratch : kScratchLimits) {
      int8moe_set_scratch_limit(scratch);
      memset(out, 0xCD, static_cast<size_t>(expected.count * expected.size));
      int32_t status;
      if (by_rows) {
        int8moe_rows_call call = {};
        call.struct_bytes = sizeof call;
        call.workers = 1;
        call.rows = tokens;
        call.x = a[7].data;
        call.x_row_stride = hidden;
        call.x_column_stride = 1;
        call.row_scales = as<float>(a[8]);
        call.row_scales_stride = 1;
        call.counts = a[9].data;
        call.counts_stride = 1;
        call.out = static_cast<float*>(out);
        call.x_dtype = x_dtype;
        call.counts_dtype = index_dtype;
        status = int8moe_forward_rows(&layer, &call);
      } else {
        int8moe_call call = {};
        call.struct_bytes = sizeof call;
        call.workers = 1;
        call.tokens = tokens;
        call.top_k = top_k;
        call.x = a[7].data;
        call.x_row_stride = hidden;
        call.x_column_stride = 1;
        call.weights = a[8].data;
        call.weights_row_stride = top_k;
        call.weights_column_stride = 1;
        call.ids = a[9].data;
        call.ids_row_stride = top_k;
        call.ids_column_stride = 1;
        call.out = out;
        call.x_dtype = x_dtype;
        call.weights_dtype = weights_dtype;
        call.ids_dtype = index_dtype;
        status = int8moe_forward(&layer, &call);
      }
      const int64_t at = status == INT8MOE_OK ? first_difference(out, expected, by_rows ? INT8MOE_F32 : x_dtype) : -2;
      if (at == -1) continue;
      good = false;
      if (at == -2)
        printf("FAIL  %-44s %s\n", name, int8moe_status_text(status));
      else
        printf("FAIL  %-44s row %lld column %lld: found %08x, expected %08x%s\n", name,
               static_cast<long long>(at / hidden), static_cast<long long>(at % hidden),
               bits_at(out, at, expected.size), bits_at(expected.data, at, expected.size),
               scratch > 0 ? " (in chunks)" : "");
      break;
    }
    free(out);
    const bool back13 = w13.unpacks(), back2 = w2.unpacks();
    if (!back13 || !back2) {
      printf("FAIL  %-44s unpacking does not give the weights back\n", name);
      good = false;
    }
    if (good) printf("ok    %-44s M %lld k %lld E %lld H %lld I %lld\n", name, static_cast<long long>(tokens),
                     static_cast<long long>(top_k), static_cast<long long>(num_experts),
                     static_cast<long long>(hidden), static_cast<long long>(inner));
    fflush(stdout);
  }
  for (Array& array : a) free(array.data);
  return good;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    fprintf(stderr, "usage: check_vectors VECTORS.bin TIER [NAME-PART]\ntiers:");
    for (int32_t t = 0; t < int8moe_tier_count(); ++t) fprintf(stderr, " %s", int8moe_tier_name(t));
    fprintf(stderr, "\n");
    return 2;
  }
  int32_t tier = -1;
  for (int32_t t = 0; t < int8moe_tier_count(); ++t)
    if (strcmp(int8moe_tier_name(t), argv[2]) == 0) tier = t;
  if (tier < 0) stop("no such tier in this program");
  file = fopen(argv[1], "rb");
  if (file == nullptr) stop("cannot open the vector file");
  if (read_one<uint32_t>() != kMagic || read_one<uint32_t>() != kFormat) stop("not a vector file of this format");
  const uint32_t cases = read_one<uint32_t>();
  uint32_t failed = 0;
  for (uint32_t c = 0; c < cases; ++c) failed += !check_case(tier, argc > 3 ? argv[3] : nullptr);
  fclose(file);
  printf("%s: %u cases, %u failed\n", argv[2], cases, failed);
  return failed == 0 ? 0 : 1;
}
