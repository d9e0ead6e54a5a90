#!/usr/bin/env bash
# BitRound makes zeros of NaNs, and infinities of others.
#
# Guess: numcodecs.BitRound drops bits of the mantissa. A NaN has an exponent of ones and stays a
#   NaN, whatever its bits.
# Seen: The NaN 0x7fffffff becomes -0.0 and 0xffffffff becomes 0.0, in float32, float16 and float64
#   alike. A NaN whose only bit is among the dropped ones (0x7f800001) becomes inf. numpy's own NaN
#   (0x7fc00000) stays.
# Version: numcodecs 0.16.6.
# Why: encode looks at the float as an integer and adds half a quantum to it before it masks
#   (numcodecs/bitround.py). From a mantissa of ones the carry runs through the exponent into the
#   sign, and over the top. No NaN is looked for.
# Means: 0x7fffffff is the NaN of CUDA (CUDART_NAN_F in its math_constants.h), and bytes of 0xff
#   are a common mark for memory that nobody wrote. In the file they are 0, and a look for NaNs
#   finds nothing. Look before, or write np.nan over what np.isnan finds.

folder=$(mktemp -d) || exit 77
trap 'rm -rf "$folder"' EXIT
venv=${FINDINGS_VENVS:-$folder}/numcodecs-0.16.6-numpy-2.4.6
if [ ! -x "$venv/bin/python" ]; then
  python3 -m venv "$venv" && "$venv/bin/pip" install -qq --disable-pip-version-check \
    numcodecs==0.16.6 numpy==2.4.6 || { rm -rf "$venv"; exit 77; }
fi
cat > "$folder/seen.py" <<'PYTHON'
import sys

import numcodecs
import numpy as np

KINDS = (
    (np.float16, np.uint16, 3, (0x7FFF, 0xFFFF, 0x7C01, 0x7E00)),
    (np.float32, np.uint32, 10, (0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7FC00000)),
    (np.float64, np.uint64, 20, (2**63 - 1, 2**64 - 1, 0x7FF0000000000001, 0x7FF8000000000000)),
)
print("numcodecs", numcodecs.__version__)
as_described = True
for dtype, word, bits, words in KINDS:
    nans = np.array(words, word).view(dtype)
    codec = numcodecs.BitRound(bits)
    back = codec.decode(codec.encode(nans))
    print(f"{np.dtype(dtype)}, {bits} bits kept:", *(f"{was:#x} -> {now}" for was, now in zip(words, back)), sep="  ")
    as_described &= bool(np.isnan(nans).all())
    as_described &= (back[:2] == 0).all() and np.signbit(back[:2]).tolist() == [True, False]
    as_described &= bool(np.isposinf(back[2]) and np.isnan(back[3]))
sys.exit(not as_described)
PYTHON
"$venv/bin/python" -W ignore "$folder/seen.py"
