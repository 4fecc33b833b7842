/* What is done to rows of numbers, and the matrix library's product, which PyTorch brings along. */
void sgemm_(const char *, const char *, const int *, const int *, const int *, const float *,
            const float *, const int *, const float *, const int *, const float *, float *,
            const int *);

/* norms of rows, with or without their mean taken away; means and inverse deviations are
 * kept where there is room for them */
static inline void norm(const float *x, const float *weight, const float *shift, float *y, float *about,
                 long rows, long w, long centred, float eps) {
  for (long i = 0; i < rows; i++, x += w, y += w) {
    float mean = 0, square = 0;
    if (centred) {
#pragma omp simd reduction(+ : mean)
      for (long c = 0; c < w; c++) mean += x[c];
      mean /= w;
    }
#pragma omp simd reduction(+ : square)
    for (long c = 0; c < w; c++) square += (x[c] - mean) * (x[c] - mean);
    /* what is too large to be squared must not become nothing */
    float by = square < INFINITY ? 1.0f / sqrtf(square / w + eps) : NAN;
    if (shift)
#pragma omp simd
      for (long c = 0; c < w; c++) y[c] = (x[c] - mean) * by * weight[c] + shift[c];
    else
#pragma omp simd
      for (long c = 0; c < w; c++) y[c] = (x[c] - mean) * by * weight[c];
    if (about) {
      about[2 * i] = mean;
      about[2 * i + 1] = by;
    }
  }
}
