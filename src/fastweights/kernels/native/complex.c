/* The scans of scan.c on complex numbers */
#define COMPLEX
#define fw_scan_forward fw_complex_forward
#define fw_scan_backward fw_complex_backward
#include "scan.c"
