/* What Python hands over for rotary positions. */
#ifndef FASTWEIGHTS_ROTATION_H
#define FASTWEIGHTS_ROTATION_H

#include "problem.h"

/* Tokens that one task takes */
#define ROTATED_TOKENS 16

/* Views of float32; cosines and sines have one head. */
typedef struct {
    int64_t b, t, h, width, threads;
    View x, cosines, sines, y;
} Rotation;

#endif
