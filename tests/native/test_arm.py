"""The kernels that a wheel brings compile for arm64 and compute there, where that can be tried.

Compiling takes a minute, so this runs only with REGARD_SLOW=1.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from regard.native import ready

COMPILER, MACHINE = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
NATIVE = Path(ready.__file__).parent
# rows times a matrix in all ways that a product can end, against sums in double precision
PROGRAM = """
#include <math.h>
#include <stdio.h>
#include "product.h"
long regard_try(void);
enum { MOST = 14, IN = 45, OUT = 70 };
int main(void) {
  static float w[OUT * IN], x[MOST * IN], y[MOST * OUT], was[MOST * OUT], bias[OUT], scale[MOST];
  static unsigned char bytes[MOST * (IN + QUAD)];
  Numbers from = {w, OUT, IN, IN, 1};
  Rounded rounded = {bytes, scale};
  long wrong = 0;
  for (long i = 0; i < OUT * IN; i++) w[i] = (i * 37 % 101 - 50) / 64.0f;
  for (long i = 0; i < MOST * IN; i++) x[i] = (i * 31 % 97 - 48) / 32.0f;
  for (long i = 0; i < OUT; i++) bias[i] = i / 8.0f - 3;
  for (long rows = 1; rows <= MOST; rows++)
    for (int in_bytes = 0; in_bytes < 2; in_bytes++)
      for (int how = STORE; how <= TIMES; how++) {
        Matrix m = {0};
        for (long i = 0; i < rows * OUT; i++) y[i] = was[i] = i % 7 / 4.0f;
        if (!pack(&m, &from, bias, 0, OUT, 0) || (in_bytes && !pack_bytes(&m))) return 2;
        product(rows, x, &rounded, &m, y, how, RELU);
        for (long i = 0; i < rows * OUT; i++) {
          double sum = bias[i % OUT];
          for (long k = 0; k < IN; k++) sum += (double)x[i / OUT * IN + k] * w[i % OUT * IN + k];
          double right = how == ADD ? sum + was[i] : how == TIMES ? sum * was[i] : sum;
          if (how == ACTIVATE) right = fmax(right, 0);
          wrong += !(fabs(right - y[i]) <= (in_bytes ? 0.9 : 1e-3));
        }
        release(&m);
      }
  printf("%ld %ld\\n", regard_try(), wrong);
  return 0;
}
"""


@pytest.mark.skipif(os.environ.get("REGARD_SLOW") != "1", reason="slow; set REGARD_SLOW=1")
@pytest.mark.skipif(
    not all(map(shutil.which, (COMPILER, MACHINE))), reason=f"there is no {COMPILER} or {MACHINE}"
)
def test_products_are_right_on_arm64(tmp_path: Path):
    (library,) = ready.build(COMPILER, tmp_path, "aarch64")
    assert ready.platform_tag([library]).endswith("_aarch64")
    source, made = tmp_path / "program.c", tmp_path / "program"
    source.write_text(PROGRAM)
    words = ["-O2", "-static", "-Wno-psabi", f"-I{NATIVE}", str(source)]
    words += [str(NATIVE / name) for name in ("product.c", "packed.c")]
    subprocess.run([COMPILER, *words, "-lm", "-lpthread", "-o", str(made)], check=True)
    done = subprocess.run([MACHINE, str(made)], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["1", "0"], done.stderr
