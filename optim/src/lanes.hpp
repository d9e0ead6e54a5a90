// One element, or a vector of them: what the loops are made of is written once for both. A `Word` is 32 bits of each element,
// a `Float` the same as a number. Vectors are as wide as those of the ISA. loops.cpp includes this.

#if defined(__AVX512F__)
constexpr size_t kLanes = 16;
#elif defined(__AVX2__)
constexpr size_t kLanes = 8;
#else
constexpr size_t kLanes = 4;
#endif

template <class Element>
struct VectorOf {
  typedef Element type __attribute__((vector_size(kLanes * sizeof(Element))));
};
using Floats = VectorOf<float>::type;
using Words = VectorOf<uint32_t>::type;
using Ints = VectorOf<int32_t>::type;

uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }
float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }
Words bits_of(Floats value) { return reinterpret_cast<Words>(value); }
Floats float_of(Words bits) { return reinterpret_cast<Floats>(bits); }

// The same number for each element.
template <class Word>
Word spread(uint32_t bits) {
  return Word{} + bits;
}

// Of magnitudes, which have no sign bit: SSE2 and AVX2 compare only signed integers.
bool is_greater(uint32_t a, uint32_t b) { return static_cast<int32_t>(a) > static_cast<int32_t>(b); }
Ints is_greater(Words a, Words b) { return reinterpret_cast<Ints>(a) > reinterpret_cast<Ints>(b); }

// A conditional expression, but never a jump: a jump around floating-point work keeps a loop scalar.
uint32_t select(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = -static_cast<uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}
Words select(Ints condition, Words yes, Words no) { return condition ? yes : no; }

float root(float value) { return __builtin_sqrtf(value); }

// What an ISA has one instruction for, which a compiler does not find by itself:
//   root            of each element;
//   smaller, larger of two magnitudes;
//   merged          bits of `a` where `mask` has ones, and of `b` elsewhere;
//   times_plus      a * b + c where the product is exact: with one rounding or two it has the same bits;
//   widened, narrow elements of memory, and words whose lower bits are written.
#if defined(__AVX512F__)
__m512i raw(Words words) { return reinterpret_cast<__m512i>(words); }
Words words(__m512i raw) { return reinterpret_cast<Words>(raw); }
__m128i sixteen(const void* bytes) { return _mm_loadu_si128(static_cast<const __m128i*>(bytes)); }

Floats root(Floats value) { return _mm512_sqrt_ps(value); }
Words smaller(Words a, Words b) { return words(_mm512_min_epi32(raw(a), raw(b))); }
Words larger(Words a, Words b) { return words(_mm512_max_epi32(raw(a), raw(b))); }
Words merged(Words mask, Words a, Words b) { return words(_mm512_ternarylogic_epi32(raw(mask), raw(a), raw(b), 0xca)); }
Floats times_plus(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
Words widened(const uint16_t* from) {
  return words(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}
Words widened(const int16_t* from) {
  return words(_mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}
Words widened(const uint8_t* from) { return words(_mm512_cvtepu8_epi32(sixteen(from))); }
Words widened(const int8_t* from) { return words(_mm512_cvtepi8_epi32(sixteen(from))); }
void narrow(Words from, uint16_t* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(raw(from)));
}
void narrow(Words from, uint8_t* to) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(raw(from)));
}
#elif defined(__AVX2__)
__m256i raw(Words words) { return reinterpret_cast<__m256i>(words); }
Words words(__m256i raw) { return reinterpret_cast<Words>(raw); }
__m128i eight(const void* bytes) { return _mm_loadl_epi64(static_cast<const __m128i*>(bytes)); }

Floats root(Floats value) { return _mm256_sqrt_ps(value); }
Words smaller(Words a, Words b) { return words(_mm256_min_epi32(raw(a), raw(b))); }
Words larger(Words a, Words b) { return words(_mm256_max_epi32(raw(a), raw(b))); }
Floats times_plus(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
Words widened(const uint16_t* from) {
  return words(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
Words widened(const int16_t* from) {
  return words(_mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
Words widened(const uint8_t* from) { return words(_mm256_cvtepu8_epi32(eight(from))); }
Words widened(const int8_t* from) { return words(_mm256_cvtepi8_epi32(eight(from))); }
void narrow(Words from, uint16_t* to) {
  const __m256i twice = _mm256_packus_epi32(raw(from & 0xffff), raw(from & 0xffff));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(_mm256_permute4x64_epi64(twice, 0x08)));
}
void narrow(Words from, uint8_t* to) {
  const __m256i lowest = _mm256_shuffle_epi8(raw(from), _mm256_set1_epi32(0x0c080400));  // of a half: 4 times
  const __m128i both = _mm_unpacklo_epi32(_mm256_castsi256_si128(lowest), _mm256_extracti128_si256(lowest, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), both);
}
#elif defined(__SSE2__)
__m128i raw(Words words) { return reinterpret_cast<__m128i>(words); }
Words words(__m128i raw) { return reinterpret_cast<Words>(raw); }

Floats root(Floats value) { return _mm_sqrt_ps(value); }
Words widened(const uint16_t* from) {
  return words(_mm_unpacklo_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)), _mm_setzero_si128()));
}
Words widened(const int16_t* from) {
  const __m128i halves = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return words(_mm_srai_epi32(_mm_unpacklo_epi16(halves, halves), 16));
}
__m128i four_times(const void* from) {
  int32_t four;  // GCC 11.1 has a _mm_loadu_si32 that puts them elsewhere
  __builtin_memcpy(&four, from, sizeof four);
  const __m128i bytes = _mm_cvtsi32_si128(four), twice = _mm_unpacklo_epi8(bytes, bytes);
  return _mm_unpacklo_epi16(twice, twice);
}
Words widened(const uint8_t* from) { return words(_mm_srli_epi32(four_times(from), 24)); }
Words widened(const int8_t* from) { return words(_mm_srai_epi32(four_times(from), 24)); }
void narrow(Words from, uint16_t* to) {
  const __m128i signed_halves = _mm_srai_epi32(_mm_slli_epi32(raw(from), 16), 16);  // packing saturates
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi32(signed_halves, signed_halves));
}
void narrow(Words from, uint8_t* to) {
  const __m128i twice = _mm_packs_epi32(raw(from & 0xff), raw(from & 0xff));
  const int32_t four = _mm_cvtsi128_si32(_mm_packus_epi16(twice, twice));
  __builtin_memcpy(to, &four, sizeof four);
}
#else
Floats root(Floats value) {
  for (size_t j = 0; j < kLanes; ++j) value[j] = root(value[j]);
  return value;
}
template <class Element>
Words widened(const Element* from) {
  typename VectorOf<Element>::type found;
  __builtin_memcpy(&found, from, sizeof found);
  using Wide = std::conditional_t<std::is_signed_v<Element>, Ints, Words>;
  return reinterpret_cast<Words>(__builtin_convertvector(found, Wide));
}
template <class Element>
void narrow(Words from, Element* to) {
  const auto found = __builtin_convertvector(from, typename VectorOf<Element>::type);
  __builtin_memcpy(to, &found, sizeof found);
}
#endif

#if !defined(__AVX512F__)
Words merged(Words mask, Words a, Words b) { return (a & mask) | (b & ~mask); }
#endif
#if !defined(__AVX2__)
Words smaller(Words a, Words b) { return select(is_greater(a, b), b, a); }
Words larger(Words a, Words b) { return select(is_greater(a, b), a, b); }
Floats times_plus(Floats a, Floats b, Floats c) { return a * b + c; }
#endif

// Elements of memory as words, and back: one, or as many as there are lanes.
template <class Word, class Element>
Word load(const Element* from) {
  if constexpr (sizeof(Element) == sizeof(uint32_t)) {
    Word found;
    __builtin_memcpy(&found, from, sizeof found);
    return found;
  } else if constexpr (std::is_same_v<Word, uint32_t>) {
    return *from;
  } else {
    return widened(from);
  }
}

template <class Word, class Element>
void store(Word bits, Element* to) {
  if constexpr (sizeof(Element) == sizeof(uint32_t)) {
    __builtin_memcpy(to, &bits, sizeof bits);
  } else if constexpr (std::is_same_v<Word, uint32_t>) {
    *to = static_cast<Element>(bits);
  } else {
    narrow(bits, to);
  }
}

// Of magnitudes: each is compared with its partner at half the distance, until the first has been with all.
template <size_t kDistance = kLanes / 2>
uint32_t largest(Words magnitudes) {
  if constexpr (kDistance == 0) {
    return magnitudes[0];
  } else {
    Words partners;
    for (size_t j = 0; j < kLanes; ++j) partners[j] = static_cast<uint32_t>(j ^ kDistance);
    return largest<kDistance / 2>(larger(magnitudes, __builtin_shuffle(magnitudes, partners)));
  }
}
