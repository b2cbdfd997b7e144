/* How a product with a quantized weight is divided: into tasks of some outputs, and these into tiles
 * of SIDE outputs and one or two rows. */
#ifndef FASTWEIGHTS_TILES_H
#define FASTWEIGHTS_TILES_H

#include "vector.h"

#define SIDE 4
#define TASK_BYTES (1 << 15)
#define LINE 64
#define FAR_BYTES 2048 /* the next outputs of longer rows would be fetched too far ahead */

/* Outputs of a task, by the bytes of each: enough that what is fetched ahead is mostly its own. */
INLINE long task_outputs(long bytes)
{
    long outputs = TASK_BYTES / bytes / SIDE * SIDE;
    return outputs > SIDE ? outputs : SIDE;
}

INLINE long tasks_of(long outputs, long bytes)
{
    return (outputs + task_outputs(bytes) - 1) / task_outputs(bytes);
}

/* Bytes from those of an output that are read now to those to fetch, by its bytes in all. */
INLINE long ahead(long bytes)
{
    return bytes > FAR_BYTES ? FAR_BYTES : SIDE * bytes;
}

/* `count` outputs from `o` on, of `rows` rows from `r` on. */
typedef void Tile(const void *product, long r, long o, int rows, int count);

INLINE void outputs_of(Tile *tile, const void *product, long rows, long o, int count)
{
    long r = 0;
    for (; r + 2 <= rows; r += 2)
        tile(product, r, o, 2, count);
    if (r < rows)
        tile(product, r, o, 1, count);
}

/* The outputs of a task. */
INLINE void run_task(Tile *tile, const void *product, long rows, long outputs, long bytes,
                     long task)
{
    long own = task_outputs(bytes), o = task * own, end = o + own < outputs ? o + own : outputs;
    for (; o + SIDE <= end; o += SIDE)
        outputs_of(tile, product, rows, o, SIDE);
    for (; o < end; o++)
        outputs_of(tile, product, rows, o, 1);
}

#endif
